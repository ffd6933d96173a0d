"""What can be wrong with a model, its files or the machine it should run on. Raised while loading, for the operator.

ModelError
├── ModelNotFoundError     the name is neither built in, nor a file or folder, nor a reachable id
├── UnsupportedModelError  an architecture, tensor type, tokenizer or option that is not implemented
├── ChecksumError          a download is not what it should be
├── DamagedCheckpointError a converted checkpoint with files missing or cut short
├── OfflineError           a download is needed and cannot be had
└── MeshError              (`model/mesh.py`) a mesh that cannot be built here
"""


class ModelError(Exception):
    """Root. The message is written for the operator and says what to do."""


class ModelNotFoundError(ModelError):
    """Nothing by that name."""


class UnsupportedModelError(ModelError):
    """Found, but not something that this version can serve; the message names the feature."""


class ChecksumError(ModelError):
    """A download whose SHA-256 is not the expected one."""


class DamagedCheckpointError(ModelError):
    """A converted checkpoint that was not written to its end, or was changed since. One in the cache is made again."""


class OfflineError(ModelError):
    """A download is needed and the package index cannot be reached."""
