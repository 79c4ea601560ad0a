"""The numbers of the papers, typed once. Notebooks take them from here and nowhere else.

Source, unless a row or a comment says otherwise: Jaszczur et al., "Sparse is Enough in Scaling Transformers",
NeurIPS 2021, arXiv 2111.12763. "Reference code" is google/trax at commit 7c189c2c (2025-04-10).

    TABLE_1.row(size="800M", variant="ff_qkv").seconds      one number
    TABLE_1.frame()                                         all of it, a pandas DataFrame

Variants are named as in sparselib.config (dense, ff, qkv, ff_qkv, ff_qkv_loss); the unit of a field is in its
name or its comment; None: the paper prints no number there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from pandas import DataFrame

Row = TypeVar("Row")


@dataclass(frozen=True)
class PaperTable(Generic[Row]):
    """Rows of one type, with where they are printed."""

    source: str
    about: str
    rows: tuple[Row, ...]

    def row(self, **keys: object) -> Row:
        """The only row whose fields have these values. Errors: ValueError where none or several have."""
        found = [row for row in self.rows if all(getattr(row, key) == value for key, value in keys.items())]
        if len(found) != 1:
            raise ValueError(f"{self.source}: {len(found)} rows with {keys}, one is asked for")
        return found[0]

    def frame(self) -> DataFrame:
        """All rows, a column a field."""
        from pandas import DataFrame

        return DataFrame([vars(row) for row in self.rows])


@dataclass(frozen=True)
class Value:
    """One number, or its lower and upper end."""

    value: float
    unit: str
    source: str
    upper: float | None = None


@dataclass(frozen=True)
class DecodeTime:
    """Seconds to decode one token at batch 1 on a CPU, and speed-up over dense as printed."""

    size: str
    variant: str
    seconds: float
    block_seconds: float | None = None  # of one decoder block
    speedup: float | None = None
    block_speedup: float | None = None


TABLE_1 = PaperTable(
    "Table 1",
    "decoding one token: Transformer and Scaling Transformer",
    (
        DecodeTime("800M", "dense", 0.160, 5.9e-3),
        DecodeTime("800M", "ff", 0.093, 3.1e-3),
        DecodeTime("800M", "qkv", 0.152, 6.2e-3),
        DecodeTime("800M", "ff_qkv", 0.061, 1.9e-3, 2.62, 3.05),
        DecodeTime("17B", "dense", 3.690, 0.581),
        DecodeTime("17B", "ff", 1.595, 0.259),
        DecodeTime("17B", "qkv", 3.154, 0.554),
        DecodeTime("17B", "ff_qkv", 0.183, 0.014, 20.0, 42.5),
    ),
)


@dataclass(frozen=True)
class FeedForwardSparsity:
    """Decoding and quality of the 800M model with one kind of feedforward layer."""

    feedforward: str  # as ModelConfig.feedforward
    ff_sparsity: int | None  # N; 1: dense; None: not printed
    seconds: float  # a token
    log_perplexity: float | None = None  # nats a token on C4


TABLE_2 = PaperTable(
    "Table 2 and section 3.1",
    "sparse feedforward alone, in the 800M size; the mixture of experts stands in the text",
    (
        FeedForwardSparsity("dense", 1, 0.160),
        FeedForwardSparsity("sparse", 64, 0.093),
        FeedForwardSparsity("sparse", 128, 0.089),
        FeedForwardSparsity("block", None, 0.11, 1.64),
    ),
)


@dataclass(frozen=True)
class Glue:
    """Validation accuracy on one GLUE task, in percent."""

    model: str
    task: str
    accuracy: float
    spread: float | None  # as printed after +-


_GLUE_TASKS = ("RTE", "MRPC", "SST-2", "QNLI", "MNLI-m", "QQP")
_GLUE: dict[str, tuple[tuple[float, ...], tuple[float | None, ...]]] = {
    "dense": ((70.1, 83.6, 92.6, 88.6, 78.5, 85.2), (1.1, 0.72, 0.85, 0.5, 0.41, 0.6)),
    "ff_qkv": ((68.4, 81.2, 91.6, 90.1, 82.9, 89.9), (None,) * 6),
    "terraformer": ((66.1, 84.6, 92.3, 88.3, 79.1, 85.5), (None,) * 6),
}
TABLE_3 = PaperTable(
    "Table 3",
    "GLUE after fine-tuning",
    tuple(Glue(model, *cells) for model, columns in _GLUE.items() for cells in zip(_GLUE_TASKS, *columns, strict=True)),
)


@dataclass(frozen=True)
class LongDigits:
    """Digits and whole sequences that come out right, in percent, on inputs longer than in training."""

    task: str
    model: str
    digits: float
    sequences: float


TABLE_4 = PaperTable(
    "Table 4",
    "trained on inputs of at most 128 digits, evaluated on 256 to 300",
    (
        LongDigits("copy", "dense", 79.8, 0.0),
        LongDigits("copy", "terraformer", 99.9, 93.9),
        LongDigits("addition", "dense", 36.4, 0.0),
        LongDigits("addition", "terraformer", 86.9, 32.4),
    ),
)


@dataclass(frozen=True)
class Rouge:
    """ROUGE F1 on arXiv summarization (times 100)."""

    model: str
    rouge_1: float
    rouge_2: float
    rouge_lsum: float
    rouge_lsent: float | None = None


TABLE_5 = PaperTable(
    "Table 5",
    "arXiv summarization, greedy decoding, rouge-score package; the other models as quoted by the paper",
    (
        Rouge("Terraformer", 45.40, 17.86, 41.21, 26.33),
        Rouge("DANCER RUM", 42.70, 16.54, 38.44),
        Rouge("BigBird-RoBERTa", 41.22, 16.43, 36.96),
        Rouge("Pegasus Large (C4)", 44.21, 16.95, 38.83, 25.67),
        Rouge("DANCER Pegasus", 45.01, 17.6, 40.56),
        Rouge("BigBird-Pegasus", 46.63, 19.02, 41.77),
    ),
)

TABLE_6 = PaperTable(
    "Table 6",
    "decoding one token: Terraformer, 17B (attention sparsity 64, FF sparsity 256, loss sparsity 4)",
    (
        DecodeTime("17B", "dense", 3.651),
        DecodeTime("17B", "ff", 1.595, speedup=2.29),
        DecodeTime("17B", "ff_qkv", 0.183, speedup=19.98),
        DecodeTime("17B", "ff_qkv_loss", 0.097, speedup=37.64),
    ),
)
TERRAFORMER_800M = Value(0.086, "s a token (sparse Transformer: TABLE_1, ff_qkv)", "section 4.4")
SAMPLING_TEMPERATURE = Value(0.5, "temperature of the printed summaries", "appendix, section 6")

# What the paper says that a figure shows, in our words.
FIGURES = {
    "figure 1": "On C4 the log-perplexity of dense, FF, QKV and FF+QKV models is equal within noise.",
    "figure 3": "FF with N = 64 is about equal to dense, with N = 128 slightly worse.",
    "figure 5": "QKV with several S and F is equal within variance; mult+conv is slightly better than dense.",
    "sparse loss": "A sparse loss layer makes perplexity slightly worse and decoding faster (appendix).",
    "terraformer": "Perplexity is similar to that of the dense and of the sparse Transformer (appendix).",
}
LIMITS = (
    "speed-ups hold for inference only, not for training",
    "decoding is unbatched and on a CPU",
    "quantization was not tried",
)


@dataclass(frozen=True)
class Size:
    """One model size of the paper. ``inferred``: not published as such, see ``source``."""

    name: str
    d_model: int
    d_ff_dense: int
    d_ff_sparse: int  # wherever QKV is sparse, to keep the number of weights
    n_heads: int
    n_encoder_layers: int
    n_layers: int  # decoder blocks
    vocab_size: int
    ff_sparsity: int  # N
    d_lowrank: int
    n_modules: int  # S
    kernel_size: int  # F
    loss_sparsity: int
    inferred: bool
    source: str


SIZES = PaperTable(
    "sections 3 and 4",
    "the two sizes whose decoding is timed",
    (
        Size(
            name="800M",
            d_model=1024,
            d_ff_dense=4096,
            d_ff_sparse=6144,
            n_heads=16,
            n_encoder_layers=24,
            n_layers=24,
            vocab_size=32000,
            ff_sparsity=64,
            d_lowrank=64,
            n_modules=16,
            kernel_size=3,
            loss_sparsity=4,
            inferred=False,
            source="sections 3.1, 3.2 and 4.4",
        ),
        Size(
            name="17B",
            d_model=9216,
            d_ff_dense=40960,
            d_ff_sparse=65536,
            n_heads=96,
            n_encoder_layers=6,
            n_layers=6,
            vocab_size=32000,
            ff_sparsity=256,
            d_lowrank=32,
            n_modules=64,
            kernel_size=3,
            loss_sparsity=4,
            inferred=True,
            source="widths of a larger configuration in the reference code; 6 + 6 layers, since they give "
            "17.1B weights and Table 1's times of a token and of a block stand as 6.35 to 1",
        ),
    ),
)
DROPOUT_800M = Value(0.1, "share", "reference code")


@dataclass(frozen=True)
class WeightCount:
    """Weights of a whole model, counted in the reference code (17B: by our inference of its sizes)."""

    size: str
    model: str
    weights: float


WEIGHTS = PaperTable(
    "reference code",
    "weights of whole models; ff_qkv keeps its attention to the encoder dense",
    (
        WeightCount("800M", "dense", 772e6),
        WeightCount("800M", "ff_qkv", 910e6),
        WeightCount("800M", "terraformer", 858e6),
        WeightCount("17B", "ff_qkv", 17.1e9),
    ),
)
QKV_WEIGHTS_SPARSE = Value(169_152, "weights at d_model 1024, S 16, F 3", "reference code")
QKV_WEIGHTS_DENSE = Value(4_198_400, "weights at d_model 1024, with output layer", "reference code")


@dataclass(frozen=True)
class TimingProtocol:
    """How the reference code times decoding."""

    batch: int = 1
    encoder_tokens: int = 16
    n_encoder_layers: int = 2
    n_layers: int = 24
    cache_tokens: int = 32
    warmup_tokens: int = 4
    timed_tokens: int = 10  # averaged
    dtype: str = "float32"


@dataclass(frozen=True)
class C4Training:
    """Span corruption on C4, as the paper's language models were trained."""

    masked_share: float = 0.15
    mean_span: float = 3.0  # tokens
    input_length: int = 512  # tokens
    target_length: int = 256  # tokens
    batch: int = 32
    steps: int = 524_000
    optimizer: str = "Adafactor"  # factored, no momentum
    decay: float = 0.8
    clip: float = 1.0
    constant_rate_steps: int = 10_000  # rate = 1 / sqrt(max(step, this))


@dataclass(frozen=True)
class ArxivTraining:
    """Summarization of arXiv papers."""

    input_length: int = 15_360  # tokens
    target_length: int = 1024  # tokens
    lsh_chunk: int = 128  # tokens
    lsh_buckets: int = 128
    lsh_hashes: int = 2


@dataclass(frozen=True)
class DigitTasks:
    """Copying and adding decimal numbers (TABLE_4)."""

    d_model: int = 256
    d_ff: int = 512
    n_encoder_layers: int = 3
    n_layers: int = 3
    n_heads: int = 4
    digits_train: int = 128  # at most
    digits_test: tuple[int, int] = (256, 300)
    addition_length_train: int = 129  # little-endian digits, at most
    addition_length_test: tuple[int, int] = (257, 301)


TIMING = TimingProtocol()
C4 = C4Training()
ARXIV = ArxivTraining()
DIGITS = DigitTasks()


@dataclass(frozen=True)
class ReferenceTime:
    """The reference code on a two-core CPU: least milliseconds a token (or a part of one layer)."""

    what: str
    variant: str
    ms: float


REFERENCE_HERE = PaperTable(
    "reference code, run by this project on a two-core CPU",
    "12 layers, d_model 1024, vocabulary 32000, float32",
    (
        ReferenceTime("token", "dense", 49.4),
        ReferenceTime("token", "ff_qkv", 44.4),
        ReferenceTime("token, weights neuron-major", "ff_qkv", 31.7),
        ReferenceTime("controller product, one layer", "ff", 1.17),
        ReferenceTime("gather of W1, one layer", "ff", 0.87),
        ReferenceTime("gather of W1 neuron-major, one layer", "ff", 0.12),
    ),
)
REFERENCE_BANDWIDTH = Value(19.0, "GB/s read", "measured beside REFERENCE_HERE")
PAPER_BANDWIDTH = Value(18.0, "GB/s read", "implied by the dense times of Table 1", upper=20.0)
