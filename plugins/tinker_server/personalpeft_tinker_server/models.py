"""The requests and responses of Tinker's API, as pydantic models.

Unknown fields are ignored, since each version of the SDK adds some.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

MAX_RANK = 64
MAX_SUM_RANK = 512
"""The largest rank of a sum of weights: vLLM loads no larger one."""
MAX_TOP_PROMPT_LOGPROBS = 256
MAX_SEQ = 2**63 - 2
"""The largest number of a call: the database must have room for the next."""
_Seq: TypeAlias = Annotated[int, Field(ge=0, le=MAX_SEQ)]
# A hundred years: the time of the end must be one that a calendar has.
_Ttl: TypeAlias = Annotated[int, Field(ge=1, le=100 * 365 * 24 * 3600)]
_Count: TypeAlias = Annotated[int, Field(ge=0)]
_Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class Wire(BaseModel):
    """The base of all requests."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


# Sessions


class CreateSession(Wire):
    sdk_version: str = ""
    tags: list[str] = []


class SessionRef(Wire):
    session_id: str


class TelemetryEvent(Wire):
    event: str = ""


class Telemetry(Wire):
    session_id: str = ""
    events: list[TelemetryEvent] = []


class LoraConfig(Wire):
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class OptimizerConfig(Wire):
    type: str = "adamw"


class CreateModel(Wire):
    session_id: str
    model_seq_id: _Seq
    base_model: str
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelRef(Wire):
    model_id: str


# Training


class InputChunk(Wire):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Wire):
    chunks: list[InputChunk]


class TensorData(Wire):
    """A dense tensor, or a sparse one in the CSR layout."""

    data: list[float]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[_Count] | None = None
    sparse_crow_indices: list[_Count] | None = None
    sparse_col_indices: list[_Count] | None = None


class Datum(Wire):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class ForwardBackwardInput(Wire):
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ForwardBackward(Wire):
    """``forward_backward``, and ``forward`` under its own name of the input."""

    model_id: str
    seq_id: _Seq | None = None
    input: ForwardBackwardInput = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )


class ReverseKLDatum(Wire):
    student_input: ModelInput
    reference_input: ModelInput
    target_tokens: TensorData
    weights: TensorData


class ReverseKL(Wire):
    """MinT's ``forward_backward_reverse_kl``."""

    model_id: str
    seq_id: _Seq | None = None
    reference_model_path: str
    data: list[ReverseKLDatum]
    temperature: Annotated[float, Field(gt=0)] = 1.0


class AdamParams(Wire):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(Wire):
    model_id: str
    seq_id: _Seq | None = None
    adam_params: AdamParams | None = None


# Weights


class SaveWeights(Wire):
    model_id: str
    seq_id: _Seq | None = None
    path: _Name | None = None
    ttl_seconds: _Ttl | None = None
    overwrite: bool = False


class SaveWeightsForSampler(SaveWeights):
    sampling_session_seq_id: _Seq | None = None


class LoadWeights(Wire):
    """``session_id`` and ``model_seq_id`` instead of ``model_id`` create the model."""

    model_id: str | None = None
    seq_id: _Seq | None = None
    session_id: str | None = None
    model_seq_id: _Seq | None = None
    base_model: str | None = None
    path: str
    optimizer: bool = False


class WeightsInfo(Wire):
    tinker_path: str


class SetTtl(Wire):
    ttl_seconds: _Ttl | None = None


class Interpolate(Wire):
    source_paths: Annotated[list[str], Field(min_length=1, max_length=16)]
    coefficients: list[float]
    output_path: _Name | None = None


class Adopt(Wire):
    """Make saved weights a layer of a user. This route is of this server alone."""

    tinker_path: str
    user: str
    layer: str
    accept: bool = False


class AdoptResponse(BaseModel):
    """The gate's judgement. ``live`` is also true where ``accept`` overrode it."""

    revision: str
    live: bool
    outcome: str
    reason: str


# Sampling


class CreateSampler(Wire):
    session_id: str
    sampling_session_seq_id: _Seq
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Wire):
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Wire):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=256)] = 1
    sampling_session_id: str | None = None
    seq_id: _Seq | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_PROMPT_LOGPROBS)] = 0


class RetrieveFuture(Wire):
    """With ``allow_metadata_only`` the size of a large result comes first, the result next."""

    request_id: str
    allow_metadata_only: bool = False


# Responses


class Result(BaseModel):
    """The base of results of calls. They are stored as JSON with ``NaN`` and ``Infinity``."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class Tensor(Result):
    data: list[float]
    dtype: str = "float32"
    shape: list[int]


class ForwardBackwardOutput(Result):
    """Metric keys end in ``:<reduction>``, by which the SDK combines the chunks of a call."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]


class SampledSequence(Result):
    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[float]


class SampleResponse(Result):
    type: Literal["sample"] = "sample"
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class ReverseKLResponse(Result):
    outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]
    type: Literal["mint_forward_backward_reverse_kl"] = "mint_forward_backward_reverse_kl"


class Checkpoint(BaseModel):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: str
    tinker_path: str
    size_bytes: int
    public: bool = False
    expires_at: str | None = None


class TrainingRun(BaseModel):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int
    last_request_time: str
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None


class InterpolateResponse(BaseModel):
    path: str
    checkpoint_type: Literal["sampler"] = "sampler"
    source_paths: list[str]
    coefficients: list[float]
    has_rank_shards: bool = False
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"
