"""The configuration of a server: its keys, their defaults, and which values make sense. Frozen once read.

`api/config_loading.py` builds it from flags, environment and YAML; the launcher and the routes read it. Names, nesting
and defaults are the contract with operators; docs/configuration.md explains each key.
"""

import ipaddress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SecretStr, field_validator, model_validator

from scheduler import ConfigError, SchedulerConfig
from scheduler.policies import BUNDLED, make_policy

REDACTED = "<redacted>"
MAX_SEED = 2**63

Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Seconds = Annotated[FiniteFloat, Field(ge=0.0)]
PositiveSeconds = Annotated[FiniteFloat, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    """A mapping of known keys. Types are exact: `"8"` is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=False)


class MeshSection(_Section):
    """How devices are arranged."""

    tp: Count = Field(default=1, description="tensor parallel size")
    dp: Count = Field(default=1, description="data parallel size: the tokens of a step are spread over it")
    ep: Count = Field(default=1, description="expert parallel size")
    devices: str | list[int] | None = Field(default=None, description="which devices, as '0-3,6' or a list; null: all")


class ServiceTiers(_Section):
    """What `service_tier` in a request means as a priority."""

    priority: Fraction = Field(default=1.0, description="priority of service_tier 'priority'")
    default: Fraction = Field(default=0.5, description="priority of service_tier 'default'")
    auto: Fraction = Field(default=0.5, description="priority of service_tier 'auto'")
    flex: Fraction = Field(default=0.0, description="priority of service_tier 'flex'")

    def priority_of(self, tier: str) -> float | None:
        """The priority that a tier stands for; None for an unknown tier."""
        value = getattr(self, tier) if tier in type(self).model_fields else None
        return float(value) if value is not None else None


class SchedulerSection(_Section):
    """Who runs, and how many at once."""

    waiting_queue_policy: str = Field(
        default="fcfs",
        description=f"order of service: {', '.join(BUNDLED)}, or a policy that a package registers",
    )
    policy_options: dict[str, Any] = Field(default_factory=dict, description="the policy's own options")
    shadow_policy: str | None = Field(
        default=None, description="a second policy that runs on the live arrivals without effect, for its metrics"
    )
    shadow_policy_options: dict[str, Any] = Field(default_factory=dict, description="the shadow policy's own options")
    capacity_policy: Literal["known_tokens", "reserve_to_completion"] = Field(
        default="known_tokens", description="whom to admit: those that fit now, or that fit to their end"
    )
    max_num_seqs: Count = Field(default=32, description="requests that run at once")
    max_num_batched_tokens: Count = Field(
        default=512, description="tokens of one step, prompt chunks and outputs together"
    )
    max_queue_size: int = Field(default=4096, ge=0, description="waiting requests beyond which the answer is 429")
    preempt_running: bool = Field(
        default=True, description="priority and mlfq: a waiting request may evict a running one"
    )
    aging_per_second: Seconds = Field(
        default=0.01, description="priority policy: what a waiting request gains per second"
    )
    service_tiers: ServiceTiers = Field(default_factory=ServiceTiers)

    @model_validator(mode="after")
    def _policies_exist(self) -> Self:
        try:
            make_policy(self.limits())
            if self.shadow_policy is not None:
                make_policy(self.shadow_limits(self.limits()))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def limits(self, **others: Any) -> SchedulerConfig:
        """What the scheduler is told. `others`: fields that other sections decide."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_size=self.max_queue_size,
            waiting_queue_policy=self.waiting_queue_policy,
            policy_options=self.policy_options,
            capacity_policy=self.capacity_policy,
            preempt_running=self.preempt_running,
            aging_per_second=self.aging_per_second,
            **others,
        )

    def shadow_limits(self, limits: SchedulerConfig) -> SchedulerConfig:
        """The same for the shadow policy, which must be set."""
        if self.shadow_policy is None:
            raise LookupError("there is no shadow policy")
        return replace(limits, waiting_queue_policy=self.shadow_policy, policy_options=self.shadow_policy_options)


class KvCacheSection(_Section):
    """The paged KV cache."""

    page_size: Count = Field(default=16, description="tokens per page")
    num_pages: Count | None = Field(
        default=None, description="pages; null: chosen from memory_fraction or, on a CPU, the limits"
    )
    memory_fraction: FiniteFloat = Field(
        default=0.8, gt=0.0, le=1.0, description="share of the free GPU memory for pages"
    )
    enable_prefix_reuse: bool = Field(default=True, description="keep and share pages of equal prefixes")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: that of the model")


class KvTransferSection(_Section):
    """How a context worker hands pages to a generation worker."""

    transport: Literal["zmq", "local", "nixl"] = Field(default="zmq", description="what carries the pages")
    host: str = Field(default="127.0.0.1", description="address to bind")
    port: int = Field(default=0, ge=0, le=65535, description="port to bind; 0: any free one")
    advertise: str | None = Field(default=None, description="host:port told to peers")
    lease_secs: PositiveSeconds = Field(default=30, description="offered pages are kept this long without a heartbeat")
    max_inflight_bytes: Count = Field(default=268435456, description="bytes that may be under way at once")


class RecordingSection(_Section):
    """A recording of the real run; see docs/recording.md."""

    path: str | None = Field(
        default=None, min_length=1, description="an empty folder that a recording of the run goes to; null: none"
    )
    max_bytes: Count = Field(default=1 << 30, description="size at which the recording stops")


class FaultSpec(_Section):
    """One fault to inject; see docs/faults.md."""

    point: Literal["engine.step", "transfer.send", "transfer.receive", "http.worker"]
    action: str
    after: int = Field(default=0, ge=0)
    count: Count | None = 1


class ServerConfig(_Section):
    """Everything that an operator may set."""

    model: str = Field(
        default="smollm2-135m-instruct", min_length=1, description="built-in name, Hugging Face folder or id, .gguf"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="what clients call it; null: the model's name"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="of the weights")
    quantization: str | None = Field(default=None, description="of the weights")
    max_model_len: Count = Field(default=2048, description="tokens of prompt and output of one request")
    seed: int | None = Field(default=None, ge=0, lt=MAX_SEED, description="used for requests without one; null: random")
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; other than loopback needs api_keys"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    mesh: MeshSection = Field(default_factory=MeshSection)
    role: Literal["unified", "context", "generation", "disaggregated"] = Field(
        default="unified", description="of this process"
    )
    scheduler_config: SchedulerSection = Field(default_factory=SchedulerSection)
    kv_cache_config: KvCacheSection = Field(default_factory=KvCacheSection)
    api_keys: list[SecretStr] = Field(
        default_factory=list, description="keys of clients; empty: no keys, loopback only"
    )
    api_key_file: str | None = Field(default=None, description="file with more api_keys, one a line")
    admin_keys: list[SecretStr] = Field(
        default_factory=list, description="keys that open /metrics, /server_info … only"
    )
    cors_origins: list[str] = Field(default_factory=list, description="origins of web pages that may call; '*': all")
    drain_timeout_secs: Seconds = Field(default=30, description="how long running requests may go on after SIGTERM")
    request_timeout_secs: PositiveSeconds = Field(default=180, description="how long one request may take")
    engine_stall_secs: PositiveSeconds = Field(
        default=60, description="a step that takes longer makes /ready 503 until it ends"
    )
    allow_request_chat_template: bool = Field(default=False, description="accept chat_template in requests")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, else JSON"
    )
    recording: RecordingSection = Field(default_factory=RecordingSection)
    kv_transfer: KvTransferSection = Field(default_factory=KvTransferSection)
    disagg: dict[str, Any] | None = Field(default=None, description="context and generation meshes in one process")
    hostname: str | None = Field(default=None, description="front end: address to listen on")
    context_servers: dict[str, Any] | None = Field(default=None, description="front end: the context workers")
    generation_servers: dict[str, Any] | None = Field(default=None, description="front end: the generation workers")
    disagg_cluster: dict[str, Any] | None = Field(default=None, description="front end: where workers find each other")
    conditional_disagg_config: dict[str, Any] | None = Field(
        default=None, description="front end: when to prefill locally"
    )
    schedule_style: str | None = Field(default=None, description="front end: which worker is asked first")
    faults: list[FaultSpec] = Field(default_factory=list, description="needs TWINMESH_ALLOW_FAULTS=1")

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _usable_keys(cls, keys: list[SecretStr]) -> list[SecretStr]:
        for key in keys:
            text = key.get_secret_value()
            if not text or any(character.isspace() or ord(character) < 32 for character in text):
                raise ValueError("a key must not be empty or hold white space")
            if text == REDACTED:
                raise ValueError(f"{REDACTED} is what --print-config shows in place of a key, not a key")
        return keys

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and not (scheme and separator and rest and "/" not in rest and origin.isprintable()):
                raise ValueError("an origin looks like https://example.org, with no path")
        return origins

    @model_validator(mode="after")
    def _keys_where_needed(self) -> Self:
        if self.admin_keys and not self.all_api_keys_given:
            raise ValueError("admin_keys need api_keys beside them: without those, nothing asks for a key")
        if not self.all_api_keys_given and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines and there are no api_keys: "
                "set TWINMESH_API_KEYS or api_key_file, or listen on 127.0.0.1"
            )
        return self

    def scheduler_limits(self, num_pages: int) -> SchedulerConfig:
        """What the scheduler of an engine with so many pages is told."""
        return self.scheduler_config.limits(
            max_model_len=self.max_model_len,
            num_pages=num_pages,
            page_size=self.kv_cache_config.page_size,
            enable_prefix_reuse=self.kv_cache_config.enable_prefix_reuse,
        )

    @property
    def all_api_keys_given(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def client_keys(self) -> list[str]:
        """The keys of clients, from the configuration and from the key file.

        Raises:
            ValueError: the file cannot be read or holds no usable key; the message never quotes its contents.
        """
        keys = [key.get_secret_value() for key in self.api_keys]
        if self.api_key_file is None:
            return keys
        try:
            lines = Path(self.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file {self.api_key_file} cannot be read ({type(error).__name__})") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ValueError(f"api_key_file {self.api_key_file} holds no key")
        if any(character.isspace() for key in found for character in key):
            raise ValueError(f"api_key_file {self.api_key_file}: a key must not hold white space")
        return keys + found

    def redacted(self) -> dict[str, Any]:
        """Plain values of every key, with `<redacted>` in place of each secret."""
        values = self.model_dump(mode="python")
        for name in ("api_keys", "admin_keys"):
            values[name] = [REDACTED] * len(values[name])
        return values


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a socket bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# Settings that the format knows and this version cannot act on: any value but the default is refused.
UNSUPPORTED: tuple[str, ...] = (
    "quantization",
    "mesh.ep",
    "role",
    "kv_transfer",
    "disagg",
    "hostname",
    "context_servers",
    "generation_servers",
    "disagg_cluster",
    "conditional_disagg_config",
    "schedule_style",
)


def unsupported_setting(config: ServerConfig) -> str | None:
    """The first key whose value this version cannot act on, or None."""
    defaults = ServerConfig()
    for path in UNSUPPORTED:
        value: object = config
        default: object = defaults
        for part in path.split("."):
            value, default = getattr(value, part), getattr(default, part)
        if value != default:
            return path
    return None
