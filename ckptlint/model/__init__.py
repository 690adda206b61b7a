"""What a checkpoint is to every rule, whoever wrote it: data alone."""

from ckptlint.model.checkpoint import (
    Checkpoint,
    CommonState,
    Format,
    OptimizerFile,
    Problem,
    ProblemKind,
    RunFolder,
    StepClaim,
    StepFile,
    StepFileState,
    StepState,
    WeightIndex,
)
from ckptlint.model.files import FILE_STATES, FileState, FileTable, StoredFile
from ckptlint.model.payload import Damage, PayloadTable, RecordContent, RecordState, empty_payload
from ckptlint.model.plans import SavePlans
from ckptlint.model.rank_files import Disagreement, Misfit, OtherName, RankFile, RankFileSet, StorageTable
from ckptlint.model.ranks import RankTable, Remark
from ckptlint.model.reference import AxisSize, Declared, ModelConfig, Reference, ReferenceKind, Seal, SealEntry
from ckptlint.model.tensors import (
    KEY_LIMIT,
    RANK_LIMIT,
    ByteObject,
    ChunkTable,
    MalformedChunk,
    RecordTable,
    ShardedObject,
    Tensor,
    empty_records,
)
from ckptlint.model.text import printable

__all__ = [
    "FILE_STATES",
    "KEY_LIMIT",
    "RANK_LIMIT",
    "AxisSize",
    "ByteObject",
    "Checkpoint",
    "ChunkTable",
    "CommonState",
    "Damage",
    "Declared",
    "Disagreement",
    "FileState",
    "FileTable",
    "Format",
    "MalformedChunk",
    "Misfit",
    "ModelConfig",
    "OptimizerFile",
    "OtherName",
    "PayloadTable",
    "Problem",
    "ProblemKind",
    "RankFile",
    "RankFileSet",
    "RankTable",
    "RecordContent",
    "RecordState",
    "RecordTable",
    "Reference",
    "ReferenceKind",
    "Remark",
    "RunFolder",
    "SavePlans",
    "Seal",
    "SealEntry",
    "ShardedObject",
    "StepClaim",
    "StepFile",
    "StepFileState",
    "StepState",
    "StorageTable",
    "StoredFile",
    "Tensor",
    "WeightIndex",
    "empty_payload",
    "empty_records",
    "printable",
]
