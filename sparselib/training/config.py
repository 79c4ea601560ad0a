"""What fixes a training: data, model, optimizer, length and seed, in one object that is read from YAML."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, model_validator

from ..checks import require
from ..config import ModelConfig, preset

T5_SIZE = 32_100  # 32,000 pieces and 100 sentinels
TASKS, TOY_SIZE = ("copy", "addition"), 16

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=-]*$", max_length=80)]  # it becomes a file's name
Count = Annotated[int, Field(ge=1, strict=True)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Config):
    """Which text, cut how.

    ``corpus``: a shipped name (lm_ci, lm_laptop), "c4", or the path of a .txt, .parquet or .jsonl(.gz) file; with the
    objective "toy", "copy" or "addition".
    ``tokenizer``: "bpe" of ``vocab_size`` tokens, learned from the train split, or "t5", 32,000 pieces and 100
    sentinels.
    ``objective``: "causal" predicts the next of ``length`` tokens; "span" predicts up to ``target_length`` tokens that
    were taken out of ``length`` (span corruption, for an encoder-decoder or a Terraformer); "toy" copies or adds up to
    ``length`` digits, in a vocabulary of 16; over the first ``growing`` batches the longest grows to that.
    """

    corpus: Annotated[str, Field(min_length=1)] = "lm_laptop"
    tokenizer: Literal["bpe", "t5"] = "bpe"
    vocab_size: Count = 4096
    length: Count = 128
    objective: Literal["causal", "span", "toy"] = "causal"
    target_length: Count | None = None
    growing: Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        span = self.objective == "span"
        require((self.target_length is not None) == span, "target_length", self.target_length, "given with span only")
        toy = self.objective == "toy"
        require(toy or self.growing is None, "growing", self.growing, "given with toy only")
        require((self.corpus in TASKS) == toy, "corpus", self.corpus, f"one of {TASKS} with toy, another without")
        pieces = TOY_SIZE if toy else self.vocab_size if self.tokenizer == "bpe" else T5_SIZE
        require(self.vocab_size == pieces, "vocab_size", self.vocab_size, f"{pieces}, the size of this vocabulary")
        return self


class OptimizerConfig(_Config):
    """AdamW, or Adafactor as in PAPER.md's C4 training, and how the rate moves.

    ``learning_rate`` is the highest rate. "cosine" rises to it in ``warmup`` steps and falls to a tenth of it at the
    last step; "inverse_root" stays on it for ``warmup`` steps, then falls as 1/sqrt(step): the paper's
    1/sqrt(max(step, 10000)) is rate 0.01 with warmup 10000. Adafactor takes it relative to the size of a weight.
    ``clip``: the largest norm of all gradients together, None for no limit. Matrices alone decay.
    """

    name: Literal["adamw", "adafactor"] = "adamw"
    learning_rate: Rate
    schedule: Literal["cosine", "inverse_root"] = "cosine"
    warmup: Annotated[int, Field(ge=0, strict=True)]
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    clip: Rate | None = 1.0


class TrainConfig(_Config):
    """One training run.

    ``model`` holds fields of :class:`~sparselib.config.ModelConfig`, and may name a ``preset`` and its ``variant`` to
    start from; its vocabulary is the data's. What is written of it names no preset, but every field that differs from
    ModelConfig's defaults, so that a record stays true when a preset changes. ``batch`` counts the sequences of one
    update over all processes, worked through in ``accumulate`` parts. Length: ``steps`` updates or ``epochs`` through
    the train split, one of the two. ``validate_every`` and ``checkpoint_every`` count steps (None: at the end only).
    ``remember``: what a Terraformer keeps for the backward pass, see :class:`~sparselib.layers.ReversibleStack`.
    """

    experiment: Name
    variant: Name
    model: dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig
    steps: Count | None = None
    epochs: Rate | None = None
    batch: Count
    accumulate: Count = 1
    validate_every: Count | None = None
    checkpoint_every: Count | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    remember: Literal["everything", "choices", "draws", "nothing"] = "choices"
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require((self.steps is None) != (self.epochs is None), "steps, epochs", (self.steps, self.epochs), "one given")
        require(self.batch % self.accumulate == 0, "batch", self.batch, f"a multiple of accumulate = {self.accumulate}")
        if self.steps is not None:
            require(
                self.optimizer.warmup <= self.steps, "warmup", self.optimizer.warmup, f"at most steps = {self.steps}"
            )
        model = self.model_config_()
        causal = self.data.objective == "causal"
        fitting = ("decoder",) if causal else ("encoder_decoder", "terraformer")
        allowed = f"{' or '.join(map(repr, fitting))} for this objective"
        require(model.architecture in fitting, "model.architecture", model.architecture, allowed)
        extra = self.data.objective == "toy"  # the plus, or the end
        is_reversible = model.architecture == "terraformer"
        require(is_reversible or self.remember == "choices", "remember", self.remember, "given for a terraformer")
        longest = max(self.data.length + extra, self.data.target_length or 0)
        require(
            model.max_len >= longest, "model.max_len", model.max_len, f"at least the {longest} tokens of a sequence"
        )
        return self

    def model_config_(self) -> ModelConfig:
        """The model, with the data's vocabulary. Errors: ValueError for a field that is unknown or cannot be."""
        fields = dict(self.model)
        size = fields.setdefault("vocab_size", self.data.vocab_size)
        require(size == self.data.vocab_size, "model.vocab_size", size, f"the data's {self.data.vocab_size}")
        if "preset" in fields:
            return preset(fields.pop("preset"), fields.pop("variant", "dense"), **fields)
        unknown = sorted(set(fields) - set(ModelConfig.__dataclass_fields__))
        require(not unknown, "model", ", ".join(unknown), "fields of ModelConfig, or preset and variant")
        try:
            return ModelConfig(**fields)
        except TypeError as error:  # names the fields that are missing
            raise ValueError(f"model: {error}") from None

    @field_serializer("model")
    def _without_preset(self, _: dict[str, Any]) -> dict[str, Any]:
        model = self.model_config_()
        fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        defaults = {field.name: field.default for field in dataclasses.fields(model)}
        written = {name: value for name, value in fields.items() if value != defaults[name]}
        # 1 and 1.0 are one setting, and name one run
        return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in written.items()}

    def __eq__(self, other: object) -> bool:
        """Whether both are written in the same way, and so name the same run."""
        return isinstance(other, TrainConfig) and self.model_dump() == other.model_dump()

    @classmethod
    def of(cls, fields: Any, name: str) -> Self:
        """The config of these fields. Errors: ValueError naming ``name``, field and value, in one line."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"{name}: {explain(error)}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """The config in a YAML file. Errors: ValueError naming file, field, value; OSError."""
        return cls.of(read_yaml(path), str(path))


def read_yaml(path: Path) -> Any:
    """Errors: ValueError for a file that is no YAML; OSError."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from None


def explain(error: ValidationError) -> str:
    """What pydantic found, in one line: each field, its value, what is wrong with it."""
    faults = []
    for fault in error.errors(include_url=False, include_context=False):
        field = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        value = "" if isinstance(fault["input"], dict) else f" = {fault['input']!r}"
        faults.append(f"{field}{value}: {message}" if field else message)
    return "; ".join(faults)
