"""Meshes and sharding rules, on eight virtual devices."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from model.mesh import MeshError, kv_sharding, make_mesh, param_sharding, parse_devices


def test_devices_are_written_as_ranges_or_lists():
    assert parse_devices(None) is None
    assert parse_devices("0-3,6") == [0, 1, 2, 3, 6]
    assert parse_devices(" 5 ") == [5]
    assert parse_devices([2, 1]) == [2, 1]
    assert parse_devices(3) == [3]


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0,,1", "1.5", "²"])
def test_what_is_no_list_of_devices_is_refused(text):
    with pytest.raises(MeshError, match="must look like"):
        parse_devices(text)


def test_a_mesh_has_a_data_and_a_tensor_axis():
    mesh = make_mesh(2, 2, devices="4-7")
    assert dict(mesh.shape) == {"dp": 2, "tp": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert sorted(device.id for device in mesh.devices.flat) == [4, 5, 6, 7]


def test_one_device_needs_no_mesh_unless_it_is_named():
    assert make_mesh() is None
    mesh = make_mesh(devices="3")
    assert [device.id for device in mesh.devices.flat] == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 2}, "ep=2"),
        ({"tp": 0}, "at least 1"),
        ({"tp": 16}, "needs 16 devices; there are 8"),
        ({"tp": 2, "devices": "7,8"}, "device 8 does not exist"),
        ({"tp": 2, "devices": [-1, 0]}, "device -1"),
        ({"tp": 2, "devices": "1,1"}, "twice"),
        ({"tp": 4, "devices": "0-1"}, "needs 4 devices; there are 2"),
        ({"tp": 2, "devices": "0-3"}, "4 devices are listed"),
    ],
)
def test_a_mesh_that_cannot_be_built_says_why(options, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**options)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("embed/embedding", (128, 32), ("tp", None)),
        ("head/kernel", (127, 32), (None, None)),
        ("layers/3/attention/qkv/kernel", (32, 4, 4, 8), (None, "tp", None, None)),
        ("layers/3/attention/qkv/kernel", (32, 3, 4, 8), (None, None, None, None)),
        ("layers/3/attention/qkv/bias", (4, 4, 8), ("tp", None, None)),
        ("layers/3/attention/out/kernel", (4, 2, 8, 32), ("tp", None, None, None)),
        ("layers/3/attention/q_norm/scale", (8,), (None,)),
        ("layers/3/mlp/gate_up/kernel", (32, 2, 64), (None, None, "tp")),
        ("layers/3/mlp/down/kernel", (64, 32), ("tp", None)),
        ("final_norm/scale", (32,), (None,)),
    ],
)
def test_a_weight_is_split_where_its_axis_divides(path, shape, spec):
    assert param_sharding(path, shape, make_mesh(2, 2)).spec == PartitionSpec(*spec)


@pytest.mark.parametrize(("heads", "width"), [(4, 2), (2, 1 * 2), (3, 6)])
def test_keys_and_values_of_a_head_stay_together(heads, width):
    """2K is split over tp only where K divides by it, so no device gets a key without its value."""
    sharding = kv_sharding(make_mesh(4 if heads == 4 else 2), heads)
    assert sharding.shard_shape((5, 2 * heads, 16, 8)) == (5, width, 16, 8)
    array = jax.device_put(jax.numpy.arange(2 * heads)[None, :, None, None], sharding)
    for shard in array.addressable_shards:
        ids = shard.data.ravel().tolist()
        assert ids[0] % 2 == 0
        assert len(ids) % 2 == 0
