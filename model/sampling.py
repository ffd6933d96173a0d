"""How one request draws its tokens, and what the device says of a drawn token.

Built by `api/`, carried through the scheduler as an opaque object, read by `model/runner.py` and `model/sampler.py`.
"""

from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling rules of one request, already validated at the edge.

    Order of the filters everywhere: temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off. top_p: 1 is off, 0 keeps the top token. min_p: 0 is off.
        presence_penalty, frequency_penalty: over the output tokens (OpenAI's definition).
        repetition_penalty: over prompt and output (CTRL, arXiv:1909.05858); 1 is off.
        logit_bias: (token id, bias) pairs.
        seed: 0 ≤ seed < 2**63. choice: the index of this choice; it draws from (seed, choice, position).
        logprobs: None for none, else how many alternatives to report with each output token, 0 … MAX_LOGPROBS.
        prompt_logprobs: the same for each prompt token.
        min_tokens: until that many tokens are out, ids in `stop_token_ids` cannot be drawn.
        stop_token_ids: at most MAX_STOP_TOKEN_IDS, end-of-sequence ids included unless they are ignored.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A longer tuple would fail on the engine's thread, and everybody with it.
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"at most {MAX_STOP_TOKEN_IDS} stop token ids, not {len(self.stop_token_ids)}")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the model's own, before bias, penalties, masks and temperature.

    `top_ids` and `top_logprobs` are the most likely tokens, best first, as many as the request asked for.
    `token_id` is the token of this position (for prompts: the prompt's token).
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
