"""What is known of the names that a pickle may ask for: exact pairs of module and name, and no prefix that is trusted.

The pairs are those that real libraries write (tests hold the list against files of theirs); what loading one of them
does is known: it makes data. Any other name is unknown, or refused where it is known to do more or may be.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

Pair = tuple[str, str]
Standing = Literal["known", "class", "unknown", "refused"]

BUILTINS = ("builtins", "__builtin__")

DTYPE = re.compile(r"(b?float|complex|u?int|bits|q?u?int)\d[\w]*|bool|half|float|double|short|int|long|cfloat|cdouble")


def _of(module: str, names: str) -> set[Pair]:
    return {(module, name) for name in names.split()}


CONTAINERS = {
    *(pair for module in BUILTINS for pair in _of(module, "set frozenset bytearray complex list dict")),
    ("_codecs", "encode"),  # bytes in protocol 2
}
"""What bytes and sets are pickled as; also allowed in `.metadata`."""

_PYTHON = CONTAINERS.union(
    *(_of(module, "range xrange slice object int long float str unicode bytes bool tuple") for module in BUILTINS),
    *(_of(module, "Ellipsis NotImplemented") for module in BUILTINS),
    _of("_io", "BytesIO"),
    _of("argparse", "Namespace"),
    _of("types", "SimpleNamespace"),
    _of("functools", "partial"),
    _of("copyreg", "_reconstructor"),
    _of("copy_reg", "_reconstructor"),
    _of("collections", "Counter defaultdict deque ChainMap UserDict UserList"),
    _of("datetime", "date time datetime timedelta timezone"),
    _of("decimal", "Decimal"),
    _of("fractions", "Fraction"),
    _of("uuid", "UUID SafeUUID"),
    _of("enum", "Enum IntEnum StrEnum Flag IntFlag"),
    _of("numbers", "Number Integral Real"),
    _of("typing", "Any Optional Union List Dict Tuple Set"),  # omegaconf keeps the types of its fields
    _of(
        "signal",
        "Signals SIGABRT SIGALRM SIGBUS SIGCHLD SIGCONT SIGFPE SIGHUP SIGILL SIGINT SIGIO SIGKILL SIGPIPE SIGPROF "
        "SIGQUIT SIGSEGV SIGSTOP SIGSYS SIGTERM SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM "
        "SIGWINCH SIGXCPU SIGXFSZ",
    ),
)

_STORAGES = (
    "BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage DoubleStorage "
    "FloatStorage HalfStorage IntStorage LongStorage QInt32Storage QInt8Storage QUInt2x4Storage QUInt4x2Storage "
    "QUInt8Storage ShortStorage"
)
_TENSORS = (
    "BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor "
    "ShortTensor"
)
_TORCH = set[Pair]().union(
    _of("torch", f"{_STORAGES} {_TENSORS} Tensor Generator device"),
    _of("torch.cuda", f"{_STORAGES} {_TENSORS}"),
    _of("torch.sparse", _TENSORS),
    _of("torch.cuda.sparse", _TENSORS),
    _of("torch._C", "Generator"),
    _of("torch.storage", "UntypedStorage TypedStorage _load_from_bytes"),  # the last: its bytes are read as well
    _of(
        "torch",
        "_mkldnn channels_last channels_last_3d contiguous_format jagged legacy_contiguous_format per_channel_affine "
        "per_channel_affine_float_qparams per_channel_symmetric per_tensor_affine per_tensor_symmetric preserve_format "
        "sparse_bsc sparse_bsr sparse_coo sparse_csc sparse_csr strided",
    ),
    _of(
        "torch._utils",
        "_rebuild_device_tensor_from_cpu_tensor _rebuild_device_tensor_from_numpy _rebuild_meta_tensor_no_storage "
        "_rebuild_nested_tensor _rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor "
        "_rebuild_sparse_csr_tensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
        "_rebuild_wrapper_subclass _rebuild_xla_tensor",
    ),
    _of("torch._tensor", "_rebuild_from_type _rebuild_from_type_v2"),
    # named, not called, in the configuration of a model
    _of(
        "torch.nn.init",
        "constant_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ trunc_normal_ uniform_ xavier_normal_ "
        "xavier_uniform_ zeros_",
    ),
    _of("torch.nn.functional", "gelu mish relu sigmoid silu softplus tanh"),
    _of("torch._C._nn", "gelu mish silu softplus"),
    _of("torch.nn.parameter", "Parameter Buffer UninitializedParameter UninitializedBuffer"),
)

_NUMPY = set[Pair]().union(
    _of("numpy", "ndarray dtype"),
    *(_of(f"numpy.{core}.multiarray", "_reconstruct scalar") for core in ("core", "_core")),
    _of(
        "numpy.dtypes",
        "BoolDType ByteDType BytesDType CLongDoubleDType Complex128DType Complex64DType DateTime64DType Float16DType "
        "Float32DType Float64DType Int16DType Int32DType Int64DType Int8DType IntDType LongDType LongDoubleDType "
        "LongLongDType ObjectDType ShortDType StrDType StringDType TimeDelta64DType UByteDType UInt16DType UInt32DType "
        "UInt64DType UInt8DType UIntDType ULongDType ULongLongDType UShortDType VoidDType",
    ),
    _of("numpy.ma", "MaskedArray"),
    _of("numpy.ma.core", "MaskedArray _mareconstruct"),
    _of("numpy.random._pickle", "__bit_generator_ctor __generator_ctor __randomstate_ctor"),
    _of("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
    _of("numpy.random._mt19937", "MT19937"),
    _of("numpy.random._pcg64", "PCG64 PCG64DXSM"),
    _of("numpy.random._philox", "Philox"),
    _of("numpy.random._sfc64", "SFC64"),
)

CLASSES = frozenset[Pair]().union(
    # DTensor and ShardedTensor as verl's files have them, and the settings of FSDP
    _of("torch.nn.modules.batchnorm", "_BatchNorm"),
    _of("torch.distributed._mesh_layout", "_FlatLayout _MeshLayout"),
    _of("torch.distributed._shard.metadata", "ShardMetadata"),
    # the second: a class inside the first, which protocol 2 asks for by `getattr`
    _of("torch.distributed._shard.sharded_tensor.api", "ShardedTensor ShardedTensor.ProcessGroupState"),
    _of(
        "torch.distributed._shard.sharded_tensor.metadata",
        "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    ),
    _of("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    _of("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    _of("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"),
    _of("torch.distributed.device_mesh", "DeviceMesh"),
    _of("torch.distributed.remote_device", "_remote_device"),
    _of("torch.distributed.tensor", "DTensor"),
    _of("torch.distributed.tensor._api", "DTensor"),
    _of("torch.distributed.tensor._dtensor_spec", "DTensorSpec ShardOrderEntry TensorMeta"),
    _of("torch.distributed.tensor.placement_types", "Partial Replicate Shard _StridedShard"),
    _of("torch.distributed._tensor.api", "DTensor"),  # torch <= 2.4
    _of("torch.distributed._tensor.placement_types", "DTensorSpec Partial Replicate Shard TensorMeta _Partial"),
    _of(
        "torch.distributed.fsdp.api",
        "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
        "LocalStateDictConfig MixedPrecision ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy "
        "StateDictType",
    ),
    # megatron.core.safe_globals (0.16) and the other enums and plain records of megatron-core
    _of("megatron.core.enums", "ModelType Fp4Recipe Fp8Recipe"),
    _of(
        "megatron.core.transformer.enums",
        "AttnBackend AttnMaskType AttnType CudaGraphScope LayerType ModelType",
    ),
    _of("megatron.core.optimizer", "AdamOptimizerConfig OptimizerConfig SGDOptimizerConfig"),
    _of(
        "megatron.core.optimizer.optimizer_config",
        "AdamOptimizerConfig OptimizerConfig ParamKey ParamPredicate ParamWithNamePredicate SGDOptimizerConfig",
    ),
    _of("megatron.core.model_parallel_config", "ModelParallelConfig"),
    _of("megatron.core.transformer.transformer_config", "MLATransformerConfig TransformerConfig"),
    _of(
        "megatron.core.rerun_state_machine",
        "Call Caller QuickStats RerunDiagnostic RerunMode RerunState RerunValidationStatus",
    ),
    _of(
        "transformer_engine.common.recipe",
        "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams MXFP8BlockScaling "
        "NVFP4BlockScaling QParams Recipe _FormatHelper",
    ),
    # training_args.bin of the Hugging Face Trainer
    _of("transformers.training_args", "OptimizerNames ParallelMode TrainingArguments"),
    _of(
        "transformers.trainer_utils",
        "FSDPOption HPSearchBackend HubStrategy IntervalStrategy SaveStrategy SchedulerType",
    ),
    _of("transformers.debug_utils", "DebugOption"),
    _of("transformers.trainer_pt_utils", "AcceleratorConfig"),
    _of("transformers.integrations.deepspeed", "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"),
    _of("transformers.utils.generic", "PaddingStrategy TensorType"),
    _of("accelerate.state", "PartialState"),
    _of(
        "accelerate.utils.dataclasses",
        "ComputeEnvironment CustomDtype DDPCommunicationHookType DeepSpeedPlugin DistributedType DynamoBackend "
        "FP8BackendType FullyShardedDataParallelPlugin LoggerType PrecisionType RNGType SageMakerDistributedType "
        "TorchDynamoPlugin",
    ),
    _of("lightning.fabric.utilities.data", "AttributeDict"),
    _of("lightning_fabric.utilities.data", "AttributeDict"),
    _of("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler LossScaler"),
    _of("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    _of("deepspeed.utils.tensor_fragment", "fragment_address"),
    _of("omegaconf.dictconfig", "DictConfig"),
    _of("omegaconf.listconfig", "ListConfig"),
    _of("omegaconf.base", "ContainerMetadata Metadata SCMode"),
    _of("omegaconf.nodes", "AnyNode BooleanNode EnumNode FloatNode IntegerNode StringNode"),
)
"""Classes that frameworks keep in a state: known where they are only made and filled, or where an enum gives a member.

A call with other arguments would run what they do when they are set up.
"""

KNOWN = frozenset(_PYTHON | _TORCH | _NUMPY)
"""Every name that is known to make data and do nothing else, however it is called."""

CALLS_ITS_ARGUMENT: dict[Pair, int] = {
    ("torch._tensor", "_rebuild_from_type"): 0,
    ("torch._tensor", "_rebuild_from_type_v2"): 0,
    ("copyreg", "_reconstructor"): 1,
    ("copy_reg", "_reconstructor"): 1,
    ("numpy.random._pickle", "__bit_generator_ctor"): 0,
    ("numpy.random._pickle", "__generator_ctor"): 1,
    ("numpy.random._pickle", "__randomstate_ctor"): 1,
}
"""Functions that call what they are given: which argument.

Source:
    torch/_tensor.py, Lib/copyreg.py, numpy/random/_pickle.py (2.x)
"""

_CALLABLE = (
    {pair for pair in _TORCH if pair[0] == "torch._utils"}
    | {
        pair
        for module in BUILTINS
        for pair in _of(module, "object int long float str unicode bytes tuple list dict set")
    }
    | {pair for pair in _NUMPY if pair[0].startswith("numpy.random._")}
    | {("torch.storage", "TypedStorage"), ("collections", "OrderedDict"), ("collections", "defaultdict")}
)
"""What these may call: rebuilding a tensor, the base of a class, a bit generator."""


# ---------------------------------------------------------------- names that are refused where they are not known

_OLD_STDLIB = frozenset({"__builtin__", "commands", "copy_reg", "imp", "popen2", "urllib2", "distutils", "asyncore"})
_DANGEROUS_PACKAGES = frozenset({"cffi", "cloudpickle", "dill", "jinja2", "joblib", "numba", "pip", "psutil"})
_DANGEROUS_PACKAGES |= {"pkg_resources", "requests", "setuptools", "urllib3", "_testcapi", "_xxsubinterpreters"}
_DANGEROUS_PREFIXES = (
    "numpy.ctypeslib",
    "numpy.DataSource",
    "numpy.distutils",
    "numpy.f2py",
    "numpy.from",
    "numpy.genfromtxt",
    "numpy.lib",
    "numpy.load",
    "numpy.memmap",
    "numpy.save",
    "numpy.testing",
    "pandas.",
    "torch._dynamo",
    "torch._inductor",
    "torch.classes",
    "torch.distributed.",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.testing",
    "torch.utils",
)
_LISTED_PACKAGES = frozenset({"torch", "numpy"})
"""Packages whose enums are listed above, so that an unknown name of theirs is none."""

_ENUM_TEXT = re.compile(r"[\w.+-]{0,64}")


def standing(module: str, name: str) -> Standing:
    """What a name is: known to make data, a class known to be kept in states, refused, or unknown.

    From protocol 4 on pickle takes a name with dots apart and reads attributes of what it finds, so that
    `("numpy.dtypes", "__loader__.set_data")` is a function: such names are refused before anything else.
    """
    if not is_importable(module, name):
        return "refused"
    if (module, name) in KNOWN or (module == "torch" and DTYPE.fullmatch(name)):
        return "known"
    if (module, name) in CLASSES:
        return "class"
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package in _OLD_STDLIB or package == "__main__":
        return "refused"
    if package == "torch" and not name[:1].isupper():
        return "refused"
    dotted = f"{module}.{name}"
    return "refused" if package in _DANGEROUS_PACKAGES or dotted.startswith(_DANGEROUS_PREFIXES) else "unknown"


def is_importable(module: str, name: str) -> bool:
    """Whether module and name are made of identifiers, and the name is one."""
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def may_be_called(module: str, name: str) -> bool:
    """Whether this is what one of `CALLS_ITS_ARGUMENT` is given in honest pickles."""
    return (module, name) in _CALLABLE


def is_function_call(module: str, name: str, args: tuple[Any, ...]) -> bool:
    """Whether calling a name that is not `known` with these arguments is more than making an object.

    A class is made without arguments, or is an enum whose member is made from its value: one number or word. A name in
    lower case is taken for a function.
    """
    if (module, name) not in CLASSES and (
        not name.lstrip("_")[:1].isupper() or module.partition(".")[0] in _LISTED_PACKAGES
    ):
        return True
    return len(args) > 1 or not all(map(_is_enum_value, args))


def _is_enum_value(value: Any) -> bool:
    return type(value) in (int, float, bool) or (type(value) is str and _ENUM_TEXT.fullmatch(value) is not None)
