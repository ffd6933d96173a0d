"""What the two completion routes share: field types and limits, the treatment of null, unknown and unsupported fields,
and the translation of pydantic's complaints. docs/api.md states the rules.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from api.protocol.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_BIAS_ENTRIES = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_METADATA_ENTRIES = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20


class FieldError(ValueError):
    """A rule that spans fields is broken: `param` is the one to blame, below the object that is being validated."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def given_fields(data: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The fields that are not null. Those in `unsupported` are left out if their value asks for nothing.

    Raises FieldError for an unsupported field that asks for something. Types count: true is not 1.
    """
    given = {name: value for name, value in data.items() if value is not None}
    for name, harmless in unsupported.items():
        if name in given:
            value = given.pop(name)
            if not any(type(value) is type(item) and value == item for item in harmless):
                raise FieldError(name, "is known but not supported yet")
    return given


def _number(value: Any) -> Any:
    """Refuse booleans where a number is wanted; pydantic's strict float takes integers but says so less clearly."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return float(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} entries, not {len(strings)}")
    if not all(isinstance(item, str) and item for item in strings):
        raise ValueError("must be strings that are not empty")
    return tuple(strings)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise ValueError(f"must have at most {MAX_BIAS_ENTRIES} entries, not {len(value)}")
    result = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 and str(int(key)) == key):
            raise ValueError("keys must be token ids in decimal, without leading zeros")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers in [-100, 100]")
        result[int(key)] = float(bias)
    return result


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"must have at most {MAX_STOP_TOKEN_IDS} entries, not {len(value)}")
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


def _metadata(value: Any) -> dict[str, str]:
    """OpenAI's limits: 16 pairs, keys up to 64 characters, values up to 512."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of strings")
    if len(value) > MAX_METADATA_ENTRIES:
        raise ValueError(f"must have at most {MAX_METADATA_ENTRIES} entries, not {len(value)}")
    if not all(len(key) <= 64 and isinstance(item, str) and len(item) <= 512 for key, item in value.items()):
        raise ValueError("keys must have at most 64 characters, values must be strings of at most 512")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class NestedModel(BaseModel):
    """Base of objects within a body; nulls and unsupported fields are treated as in `RequestModel`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        return given_fields(data, cls.unsupported) if isinstance(data, dict) else data


class StreamOptions(NestedModel):
    """OpenAI's `stream_options`. Without `stream` they ask for what a whole answer has anyway: its usage."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    include_usage: bool = False


# Fields that users of other servers send to either route, and the values that ask for what we do anyway.
UNSUPPORTED_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class RequestModel(BaseModel):
    """Base of the request bodies. Null means left out; a field that is known but not supported is refused by name.

    `unsupported` maps such fields to the values that ask for nothing, and so pass.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Validate a decoded body. Raises InvalidRequestError naming the field."""
        try:
            given = given_fields(data, cls.unsupported)
        except FieldError as error:
            raise InvalidRequestError(f"'{error.param}' {error}", param=error.param) from None
        for name in given:
            if name not in cls.model_fields:
                close = difflib.get_close_matches(name[:64], cls.model_fields, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise InvalidRequestError(f"unknown field '{name[:64]}'{hint}", param=name[:64])
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _translated(error) from None


def _translated(error: ValidationError) -> InvalidRequestError:
    """Pydantic's first complaint, without the value that caused it."""
    first = error.errors(include_input=False, include_url=False)[0]
    path = [str(part)[:64] for part in first["loc"]]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        path.append(cause.param)
    param = ".".join(path) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "is required"
    elif first["type"] == "extra_forbidden":
        message = "is not a known field"
    else:
        message = message[:1].lower() + message[1:]
    return InvalidRequestError(f"'{param}': {message}" if param else message, param=param)


class SamplingFields(RequestModel):
    """Fields of both completion routes. Ranges are checked here, token ids in `api/translate.py`.

    `max_tokens` and `max_completion_tokens` may both be given; the latter wins.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 62)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str])] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_token_ids)] = ()
    min_tokens: Count = 0
    ignore_eos: bool = False
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float])] = (
        Field(default_factory=dict)
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    priority: Annotated[Number, Field(ge=0, le=1)] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")] | None = None
    echo: bool = False
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] | None = None
