"""Save a small GPT of Megatron-Core in one layout, load it into another, and say what came of it.

    python bench/evidence/megatron_loads.py OUT [PAIR ...]

For every pair that the importable megatron-core can write there is `OUT/<pair>/iter_0000010`, the checkpoint, and a
row in `OUT/outcomes.json`: whether the load raised, and which tensors do not hold what was saved. The load is
Megatron-LM's own `load_checkpoint` where `megatron.training` is importable (from 0.17 on the wheel holds it);
otherwise `dist_checkpointing.load` under the decisions that `load_checkpoint` takes before it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import signal
import socket
import sys
import tempfile
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))
if not hasattr(typing, "override"):  # megatron.training of 0.18 asks for Python 3.12
    import typing_extensions

    typing.override = typing_extensions.override

import megatron_cpu  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from megatron_cpu import CudaToCpu, accepted  # noqa: E402

megatron_cpu.use_cpu()

import torch._dynamo  # noqa: E402
import torch.distributed.tensor  # noqa: E402
from megatron.core import (  # noqa: E402
    dist_checkpointing,
    model_parallel_config,
    package_info,
    parallel_state,
    utils,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from packaging.version import Version  # noqa: E402

try:
    from megatron.training import checkpointing, global_vars
except ImportError:
    checkpointing = global_vars = None

model_parallel_config.warnings = warnings  # 0.15 warns without having imported it
VERSION = (package_info.MAJOR, package_info.MINOR)
STEP = 10
SECONDS = 150

# count the steps as the optimizers of Apex and TE do, which need a GPU: in the groups, none with the states
distrib_optimizer.HAVE_APEX_OR_TE = True
torch.optim.Adam.__setstate__ = torch.optim.Optimizer.__setstate__


@dataclasses.dataclass(frozen=True)
class Job:
    """One training job: its layout, its model, and how it saves and loads."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 0
    layers: int = 4
    heads: int = 4
    groups: int = 4
    experts: int = 0
    moe_freq: tuple[int, ...] = ()
    vocab: int = 16
    divisible_by: int = 8
    gated: bool = True
    untied: bool = True
    distributed: bool = True
    sharding: str = ""
    bucket: int = 0
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_save_rng: bool = False
    no_save_optim: bool = False
    finetune: bool = False
    strictness: str = "assume_ok_unexpected"
    fully_parallel_load: bool = False
    rerun: bool = False
    checkpoint_args: bool = True

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, as Megatron-LM pads them."""
        step = self.divisible_by * self.tp
        return -(-self.vocab // step) * step


def arguments(job: Job, folder: Path | None = None) -> argparse.Namespace:
    """The arguments of Megatron-LM that saving and loading read."""
    return argparse.Namespace(
        num_layers=job.layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=job.heads,
        group_query_attention=job.groups != job.heads,
        num_query_groups=job.groups,
        kv_channels=4,
        vocab_size=job.vocab,
        padded_vocab_size=job.padded_vocab,
        make_vocab_size_divisible_by=job.divisible_by,
        max_position_embeddings=16,
        swiglu=job.gated,
        add_bias_linear=False,
        add_position_embedding=False,
        untie_embeddings_and_output_weights=job.untied,
        position_embedding_type="rope",
        normalization="RMSNorm",
        world_size=job.world,
        data_parallel_size=job.dp,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp or None,
        context_parallel_size=1,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp or job.tp,
        num_experts=job.experts or None,
        moe_layer_freq=list(job.moe_freq) or 1,
        moe_grouped_gemm=False,
        bf16=True,
        fp16=False,
        params_dtype=torch.bfloat16,
        model_type=ModelType.encoder_or_decoder,
        optimizer="adam",
        use_distributed_optimizer=job.distributed,
        overlap_grad_reduce=bool(job.bucket),
        ddp_bucket_size=job.bucket or None,
        ddp_num_buckets=None,
        global_batch_size=8,
        ckpt_format="torch_dist",
        auto_detect_ckpt_format=False,
        use_dist_ckpt=True,
        ckpt_step=None,
        ckpt_fully_parallel_save=job.sharding != "dp_zero_gather_scatter",
        ckpt_fully_parallel_load=job.fully_parallel_load,
        ckpt_fully_parallel_load_process_group="dp",
        ckpt_fully_parallel_load_exchange_algo="broadcast",
        ckpt_assume_constant_structure=False,
        ckpt_load_validate_sharding_integrity=True,
        ckpt_convert_update_legacy_dist_opt_format=False,
        dist_ckpt_strictness=job.strictness,
        dist_ckpt_optim_fully_reshardable=job.sharding == "fully_reshardable",
        distrib_optim_fully_reshardable_mem_efficient=False,
        stream_ckpt_dequant=False,
        verify_integrity=False,
        load_main_params_from_ckpt=False,
        override_ckpt_iteration=None,
        phase_transition_iterations=None,
        retro_add_retriever=False,
        non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None,
        exit_on_missing_checkpoint=False,
        no_load_optim=job.no_load_optim or None,
        no_load_rng=job.no_load_rng or None,
        no_save_optim=job.no_save_optim or None,
        no_save_rng=job.no_save_rng or None,
        finetune=job.finetune,
        data_parallel_random_init=False,
        async_save=False,
        async_strategy="mcore",
        log_progress=False,
        vocab_file=None,
        hybrid_layer_pattern=None,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        iteration=STEP,
        load=str(folder),
        save=None,
    )


class Schedule:
    """A learning rate schedule: only that it was loaded counts."""

    loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Numbers."""
        return {"max_lr": 3e-4, "num_steps": 80}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that it was loaded."""
        self.loaded = state["num_steps"] == 80


def start(job: Job) -> None:
    """Process groups and seeds."""
    options = {
        "tensor_model_parallel_size": job.tp,
        "pipeline_model_parallel_size": job.pp,
        "virtual_pipeline_model_parallel_size": job.vpp or None,
        "expert_model_parallel_size": job.ep,
        "create_gloo_process_groups": True,
    }
    if job.etp:
        options["expert_tensor_parallel_size"] = job.etp
    parallel_state.initialize_model_parallel(**accepted(parallel_state.initialize_model_parallel, options))
    model_parallel_cuda_manual_seed(1234)


def models(job: Job) -> list[torch.nn.Module]:
    """This rank's parts of the model, each wrapped for data parallelism."""
    options = {
        "num_layers": job.layers,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": job.heads,
        "num_query_groups": job.groups,
        "kv_channels": 4,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": job.tp,
        "pipeline_model_parallel_size": job.pp,
        "virtual_pipeline_model_parallel_size": job.vpp or None,
        "add_bias_linear": False,
        "gated_linear_unit": job.gated,
        "activation_func": torch.nn.functional.silu if job.gated else torch.nn.functional.gelu,
        "normalization": "RMSNorm",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if job.experts:
        options |= {
            "num_moe_experts": job.experts,
            "moe_layer_freq": list(job.moe_freq) or 1,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": job.ep,
            "expert_tensor_parallel_size": job.etp or job.tp,
        }
    config = TransformerConfig(**accepted(TransformerConfig.__init__, options))
    ddp = {
        "use_distributed_optimizer": job.distributed,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": bool(job.bucket),
        "bucket_size": job.bucket or None,
    }
    chunks = []
    for part in range(job.vpp or 1):
        if job.vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(part)
        stage = {"ignore_virtual": False, "vp_stage": part} if job.vpp and VERSION >= (0, 13) else {}
        if job.moe_freq:
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

            stages = {"use_transformer_engine": False, "normalization": "RMSNorm"} | (
                {"vp_stage": part} if job.vpp else {}
            )
            spec = get_gpt_decoder_block_spec(config, **accepted(get_gpt_decoder_block_spec, stages))
        else:
            spec = get_gpt_layer_local_spec(
                **accepted(get_gpt_layer_local_spec, {"num_experts": job.experts or None, "normalization": "RMSNorm"})
            )
        settings = {
            "config": config,
            "transformer_layer_spec": spec,
            "vocab_size": job.padded_vocab,
            "max_sequence_length": 16,
            "position_embedding_type": "rope",
            "pre_process": parallel_state.is_pipeline_first_stage(**stage),
            "post_process": parallel_state.is_pipeline_last_stage(**stage),
            "share_embeddings_and_output_weights": not job.untied,
            "vp_stage": part if job.vpp else None,
        }
        model = GPTModel(**accepted(GPTModel.__init__, settings)).to(torch.bfloat16)
        ddp_config = DistributedDataParallelConfig(**accepted(DistributedDataParallelConfig.__init__, ddp))
        chunks.append(DistributedDataParallel(config=config, ddp_config=ddp_config, module=model))
    return chunks


def optimizer_of(job: Job, chunks: list[torch.nn.Module]) -> Any:
    """Megatron's optimizer of these parts."""
    config = OptimizerConfig(
        optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=job.distributed
    )
    return get_megatron_optimizer(config, chunks)


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that hold parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if getattr(part, "optimizer", None) is not None]


def step_once(optimizer: Any) -> None:
    """One step of the inner Adam, so that its states hold numbers that differ from place to place."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            group["step"] = STEP
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 0.1 + 0.01
        inner.step()
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for state in inner.state.values():
            del state["step"]


# ---------------------------------------------------------------- what a rank holds

Piece = tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]
"""Key, global shape, global offset, values."""


def pieces_of(sharded: Any, values: torch.Tensor) -> Iterator[Piece]:
    """Where the values of a parameter lie in its global tensors; a fused projection has two."""
    if isinstance(sharded, ShardedTensorFactory):
        built = dataclasses.replace(sharded, data=values).build()
        found = [one for one in nested_values(built) if isinstance(one, ShardedTensor)]
    else:
        found = [dataclasses.replace(sharded, data=values, dtype=values.dtype)]
    for one in found:
        data = one.data.detach().float().reshape((1,) * one.prepend_axis_num + tuple(one.data.shape))
        yield one.key, tuple(one.global_shape), tuple(one.global_offset), data.numpy().copy()


def held(chunks: list[torch.nn.Module], optimizer: Any) -> list[Piece]:
    """Every weight of this rank and every state of its optimizer, under the key of the weight."""
    found: list[Piece] = []
    by_parameter: dict[int, Any] = {}
    for part, chunk in enumerate(chunks):
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(part)
        state = chunk.module.sharded_state_dict()
        for sharded in nested_values(state):
            if isinstance(sharded, (ShardedTensor, ShardedTensorFactory)) and sharded.data is not None:
                by_parameter[id(sharded.data)] = sharded
                found += pieces_of(sharded, sharded.data)
    for name, parameter, start_, values in states_of(optimizer):
        whole = torch.full((parameter.numel(),), float("nan"))
        whole[start_ : start_ + values.numel()] = values.detach().float().flatten()
        sharded = by_parameter.get(id(parameter))
        if sharded is not None:  # the output layer's copy of a tied embedding has no key of its own
            prefixed = dataclasses.replace(sharded, key=f"optimizer.{name}.{sharded.key}")
            found += pieces_of(prefixed, whole.view(parameter.shape))
    return found


def states_of(optimizer: Any) -> Iterator[tuple[str, torch.Tensor, int, torch.Tensor]]:
    """State name, model parameter, where in it the state begins, and the state, for every part of the optimizer."""
    for part in parts_of(optimizer):
        if hasattr(part, "gbuf_ranges"):
            for ranges in part.gbuf_ranges:
                for buckets in ranges.values():
                    for bucket in buckets:
                        for parameter, places in bucket["param_map"].items():
                            states = part._get_main_param_and_optimizer_states(parameter)
                            for name, values in states.items():
                                if name != "step":
                                    yield name, parameter, places["param"].start, values
            continue
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(weights, mains, strict=True):
                yield "param", parameter, 0, main
                for name, values in part.optimizer.state[main].items():
                    if name != "step":
                        yield name, parameter, 0, values


def place() -> tuple[int, int]:
    """Pipeline and tensor rank."""
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


def seed_of(job: Job) -> int:
    """Of each place in the model; all of its data-parallel ranks have the same one."""
    pipeline, tensor = place()
    return 1000 + 10 * pipeline + tensor


# ---------------------------------------------------------------- saving


def content_of(job: Job) -> dict[str, Any]:
    """What the version of Megatron-LM writes about the form of its state, without what it decides from arguments."""
    if VERSION < (0, 13):
        return {}
    content: dict[str, Any] = {}
    if job.distributed:
        content["distrib_optim_sharding_type"] = job.sharding
    if VERSION >= (0, 14):
        content |= {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return content


def random_states(job: Job) -> Any:
    """The random number states of this rank, as this version of Megatron-LM shards them."""
    if checkpointing is not None:
        options: dict[str, Any] = {"ckpt_format": "torch_dist"}
        options["tp_group"] = parallel_state.get_tensor_model_parallel_group()
        options["pp_group"] = parallel_state.get_pipeline_model_parallel_group()
        return checkpointing.get_rng_state(**accepted(checkpointing.get_rng_state, options))
    states = {"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if job.ep > 1 and VERSION == (0, 16):
        return ShardedObject("rng_state", [states], (job.pp, job.tp, job.dp), (*place(), replica), replica_id=0)
    return ShardedObject("rng_state", [states], (job.pp, job.tp), place(), replica_id=replica)


def rerun_states(force: bool = False) -> Any:
    """The state of the rerun machine, in the midst of a rerun."""
    from megatron.core import rerun_state_machine as rerun

    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine = rerun.get_rerun_state_machine()
    machine.state = rerun.RerunState.RERUNNING_IN_PLACE
    return machine.state_dict(**accepted(machine.state_dict, {"data_iterator": None, "ckpt_format": "torch_dist"}))


def sharded_state(job: Job, chunks: list[Any], optimizer: Any, content: dict[str, Any], loading: bool) -> dict:
    """Weights and optimizer as Megatron-LM's generate_state_dict shards them."""
    state: dict[str, Any] = {}
    for part, chunk in enumerate(chunks):
        if len(chunks) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(part)
        function = chunk.module.sharded_state_dict
        name = f"model{part}" if len(chunks) > 1 else "model"
        state[name] = function(**accepted(function, {"metadata": content or None}))
    if optimizer is not None:
        models_ = state if len(chunks) > 1 or VERSION >= (0, 15) else state["model"]
        first = getattr(optimizer, "chained_optimizers", [optimizer])[0].sharded_state_dict
        options = accepted(first, {"metadata": content, "is_loading": loading})
        if "metadata" not in options and job.distributed:
            options |= accepted(first, {"sharding_type": job.sharding})
        state["optimizer"] = optimizer.sharded_state_dict(models_, **options)
    return state


def save(rank: int, job: Job, folder: Path) -> list[Piece]:
    """Build, step, save; what this rank holds."""
    with CudaToCpu():
        start(job)
        args = arguments(job)
        if checkpointing is not None:
            global_vars._GLOBAL_ARGS = args
        chunks = models(job)
        optimizer = optimizer_of(job, chunks)
        step_once(optimizer)
        content = content_of(job)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        known = content | ({"dp_cp_group": group} if VERSION >= (0, 15) else {})
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": STEP}
        if job.checkpoint_args:
            state["args"] = args
        state |= sharded_state(job, chunks, None if job.no_save_optim else optimizer, known, loading=False)
        if not job.no_save_optim:
            state["opt_param_scheduler"] = Schedule().state_dict()
        random.seed(seed_of(job))
        torch.manual_seed(seed_of(job))
        if not job.no_save_rng:
            state["rng_state"] = random_states(job)
        if job.rerun:
            state["rerun_state_machine"] = rerun_states()
        step = folder / f"iter_{STEP:07d}"
        if rank == 0:
            step.mkdir(parents=True)
        dist.barrier()
        strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1)
        if args.ckpt_fully_parallel_save:
            from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

            strategy = FullyParallelSaveStrategyWrapper(strategy, group, False)
        options = {"content_metadata": content, "validate_access_integrity": True}
        dist_checkpointing.save(state, str(step), strategy, **accepted(dist_checkpointing.save, options))
        dist.barrier()
        if rank == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
        return held(chunks, optimizer)


# ---------------------------------------------------------------- loading


def load(rank: int, job: Job, folder: Path) -> dict[str, Any]:
    """Build, load, and what this rank holds then."""
    with CudaToCpu():
        schedule = Schedule()
        try:
            start(job)
            random.seed(7)
            torch.manual_seed(7000 + rank)
            chunks = models(job)
            optimizer = optimizer_of(job, chunks)
        except Exception as error:
            return {"raised": said(error), "stage": "build"}
        if job.rerun:
            rerun_states()
        random.seed(7)
        torch.manual_seed(7000 + rank)
        before = torch.get_rng_state()
        try:
            if checkpointing is not None:
                through_megatron_lm(job, chunks, optimizer, schedule, folder)
            else:
                through_the_library(job, chunks, optimizer, schedule, folder)
        except BaseException as error:  # the exception of torch.distributed.checkpoint is one
            return {"raised": said(error), "stage": "load"}
        after = torch.get_rng_state()
        torch.manual_seed(seed_of(job))
        rng = "as saved" if after.equal(torch.get_rng_state()) else "untouched" if after.equal(before) else "other"
        steps = {group.get("step") for part in parts_of(optimizer) for group in part.optimizer.param_groups}
        return {
            "pieces": held(chunks, optimizer if states_are_there(optimizer) else None),
            "rng": rng,
            "schedule": schedule.loaded,
            "steps": sorted(float(step) for step in steps if step is not None),
        }


def states_are_there(optimizer: Any) -> bool:
    """Whether the inner optimizers hold any state."""
    return any(part.optimizer.state for part in parts_of(optimizer))


def said(error: BaseException) -> str:
    """The exception's class and the first lines of what it says."""
    if os.environ.get("TRACEBACK"):
        traceback.print_exc()
    cause = error
    failures = getattr(error, "failures", None)  # of torch's CheckpointException, by rank
    if failures:
        cause = next(iter(failures.values()))[0]
    text = " ".join(str(cause).split())[:300]
    return f"{type(error).__name__}: {text}" if cause is error else f"{type(error).__name__}: {said(cause)}"


def through_megatron_lm(job: Job, chunks: list[Any], optimizer: Any, schedule: Schedule, folder: Path) -> None:
    """Megatron-LM's own load."""
    args = arguments(job, folder)
    global_vars._GLOBAL_ARGS = args
    if job.rerun is False:
        from megatron.core import rerun_state_machine as rerun

        rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    checkpointing.update_num_microbatches = lambda *args, **options: None
    utils._te_version = getattr(utils, "_te_version", None) or Version("2.0")  # 0.12 asks, whatever is installed
    checkpointing.load_checkpoint(chunks, optimizer, schedule)


def through_the_library(job: Job, chunks: list[Any], optimizer: Any, schedule: Schedule, folder: Path) -> None:
    """dist_checkpointing.load, asked for what Megatron-LM asks for.

    Source:
        megatron.training.checkpointing.load_checkpoint (Megatron-LM core_v0.16.1)
    """
    step = folder / f"iter_{STEP:07d}"
    common = dist_checkpointing.load_common_state_dict(str(step))
    old = common.get("args") or argparse.Namespace()
    then = (getattr(old, "tensor_model_parallel_size", 1), getattr(old, "pipeline_model_parallel_size", 1))
    same = then == (job.tp, job.pp)
    content = common.get("content_metadata")
    wants_optimizer = not (job.no_load_optim or job.finetune)
    if wants_optimizer and job.distributed:
        if content is None:
            parallel = getattr(old, "ckpt_fully_parallel_save", False)
            form = "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"
            content = {"distrib_optim_sharding_type": form}
        free = distrib_optimizer.DistributedOptimizer.checkpoint_fully_reshardable_formats
        if not same and content["distrib_optim_sharding_type"] not in free:
            raise RuntimeError(f"(TP, PP) mismatch: not supported with {content['distrib_optim_sharding_type']}")
    content = (content or {}) | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = sharded_state(job, chunks, optimizer if wants_optimizer else None, content, loading=True)
    wants_random = same and not (job.no_load_rng or job.finetune or getattr(old, "no_save_rng", False))
    if wants_random:
        state["rng_state"] = random_states(job)
    loaded = dist_checkpointing.load(state, str(step), strict=job.strictness)
    for part, chunk in enumerate(chunks):
        name = f"model{part}" if len(chunks) > 1 else "model"
        chunk.load_state_dict(loaded[name], strict=True)
    if wants_optimizer:
        optimizer.load_state_dict(loaded["optimizer"])
        schedule.load_state_dict(loaded["opt_param_scheduler"])
    else:
        optimizer.reload_model_params()
    if wants_random:
        random.setstate(loaded["rng_state"][0]["random_rng_state"])
        torch.set_rng_state(loaded["rng_state"][0]["torch_rng_state"])


# ---------------------------------------------------------------- ranks


def run(job: Job, function: Callable[..., Any], folder: Path) -> list[Any]:
    """What the function returned on each rank; None for a rank that died."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as answers:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        context = torch.multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(rank, job, function, folder, port, answers))
            for rank in range(job.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        files = [Path(answers, f"{rank}.pt") for rank in range(job.world)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _rank(rank: int, job: Job, function: Callable[..., Any], folder: Path, port: int, answers: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
    signal.alarm(SECONDS)  # a hung collective must not hang the script
    torch.set_num_threads(1)
    status = 0
    log = Path(answers, f"{rank}.log")
    if not os.environ.get("TRACEBACK"):
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=job.world)
        torch.manual_seed(1234)
        answer = function(rank, job, folder)
        torch.save(answer, Path(answers, f"{rank}.part"))
        Path(answers, f"{rank}.part").rename(Path(answers, f"{rank}.pt"))
        Path(answers, f"{rank}.done").touch()
        signal.alarm(10)  # a peer that failed does not come
        while len(list(Path(answers).glob("*.done"))) < job.world:
            signal.sigtimedwait([], 0.05)
    except BaseException:
        sys.__stderr__.write(traceback.format_exc())
        folder.with_suffix(f".{rank}.err").write_text(traceback.format_exc())
        status = 1
    import multiprocessing

    for child in multiprocessing.active_children():  # megatron-core leaves its Manager process behind
        child.terminate()
    os._exit(status)


def assembled(pieces: list[Piece]) -> tuple[dict[str, np.ndarray], set[str]]:
    """The global tensors of all ranks' pieces, and the keys of which two ranks hold different values."""
    whole: dict[str, np.ndarray] = {}
    differing: set[str] = set()
    for key, shape, offset, values in pieces:
        target = whole.setdefault(key, np.full(shape, np.nan, np.float32))
        box = tuple(slice(low, low + size) for low, size in zip(offset, values.shape, strict=True))
        there, new = target[box], ~np.isnan(values)
        both = new & ~np.isnan(there)
        if (there[both] != values[both]).any():
            differing.add(key)
        there[new] = values[new]
    return whole, differing


def compared(saved: list[Piece], loaded: list[Piece]) -> dict[str, list[str]]:
    """Where what was loaded is not what was saved; of tensors of other shapes the common part counts."""
    before, _ = assembled(saved)
    after, differing = assembled(loaded)
    result: dict[str, list[str]] = {
        "not held": sorted(set(before) - set(after)),
        "new": sorted(set(after) - set(before)),
        "ranks differ": sorted(differing),
        "not as saved": [],
        "other shape": [],
        "padding not zero": [],
    }
    for key in sorted(set(before) & set(after)):
        one, two = before[key], after[key]
        if one.shape != two.shape:  # a vocabulary that is padded otherwise
            result["other shape"].append(f"{key} {one.shape} {two.shape}")
            common = tuple(slice(0, min(sizes)) for sizes in zip(one.shape, two.shape, strict=True))
            beyond = two.copy()
            beyond[common] = 0
            if beyond.any():
                result["padding not zero"].append(key)
            one, two = one[common], two[common]
        if not np.array_equal(one, two, equal_nan=True):
            result["not as saved"].append(key)
    return {name: keys for name, keys in result.items() if keys}


# ---------------------------------------------------------------- pairs

DENSE = Job(tp=2, sharding="fully_reshardable")
MOE = Job(experts=4, ep=2, dp=2, layers=2, sharding="fully_reshardable")
BUCKETS = Job(tp=2, dp=2, sharding="dp_reshardable")
FLAT = Job(tp=2, sharding="fully_sharded_model_space", no_load_rng=True)
GATHERED = Job(tp=2, dp=2, sharding="dp_zero_gather_scatter")


replaced = dataclasses.replace


def pair(saved: Job, **changes: Any) -> tuple[Job, Job]:
    """A job and the one that loads what it saved."""
    return saved, dataclasses.replace(saved, **changes)


PAIRS: dict[str, tuple[Job, Job]] = {
    "reshardable tp2 to dp2": pair(DENSE, tp=1, dp=2),
    "reshardable tp2 to tp4": pair(DENSE, tp=4),
    "reshardable pp2 to tp2": pair(replaced(DENSE, tp=1, pp=2), tp=2, pp=1),
    "reshardable pp2 vpp2 to one rank": pair(replaced(DENSE, tp=1, pp=2, vpp=2), pp=1, vpp=0),
    "reshardable one rank to pp2 vpp2": pair(replaced(DENSE, tp=1), pp=2, vpp=2),
    "reshardable tied pp2 to tp2": pair(replaced(DENSE, tp=1, pp=2, untied=False), tp=2, pp=1),
    "reshardable without gates tp2 to tp1": pair(replaced(DENSE, gated=False), tp=1),
    "reshardable vocabulary grows with tp": pair(replaced(DENSE, tp=1, vocab=17), tp=2),
    "reshardable vocabulary shrinks with tp": pair(replaced(DENSE, vocab=17), tp=1),
    "reshardable strict": pair(DENSE, tp=1, dp=2, strictness="raise_all"),
    "reshardable finetune": pair(DENSE, tp=1, dp=2, finetune=True),
    "reshardable groups under tp": pair(replaced(DENSE, groups=2), tp=4),
    "reshardable parallel load": pair(DENSE, tp=1, dp=2, fully_parallel_load=True),
    "buckets dp2 to dp1": pair(BUCKETS, dp=1),
    "buckets dp1 to dp2": pair(replaced(BUCKETS, dp=1), dp=2),
    "buckets tp2 to dp4": pair(BUCKETS, tp=1, dp=4),
    "buckets tp2 to tp1 without optimizer": pair(BUCKETS, tp=1, no_load_optim=True),
    "buckets pp2 to pp2 vpp2": pair(replaced(BUCKETS, tp=1, pp=2, dp=1), vpp=2),
    "buckets pp2 vpp2 to pp2": pair(replaced(BUCKETS, tp=1, pp=2, dp=1, vpp=2), vpp=0),
    "buckets cut elsewhere": pair(replaced(BUCKETS, tp=1, bucket=1000), bucket=3000),
    "buckets ep2 to ep1": pair(replaced(MOE, sharding="dp_reshardable"), ep=1),
    "buckets ep1 to ep2": pair(replaced(MOE, ep=1, sharding="dp_reshardable"), ep=2),
    "buckets ep2 dp2 to dp4": pair(replaced(MOE, sharding="dp_reshardable"), dp=4),
    "buckets ep2 to ep1 without optimizer": pair(replaced(MOE, sharding="dp_reshardable"), ep=1, no_load_optim=True),
    "gathered dp2 to dp1": pair(GATHERED, dp=1),
    "gathered tp2 to tp1": pair(GATHERED, tp=1),
    "gathered pp2 to pp2 vpp2": pair(replaced(GATHERED, tp=1, pp=2, dp=1), vpp=2),
    "gathered parallel load": pair(GATHERED, dp=1, fully_parallel_load=True),
    "flat tp2 to tp1": pair(FLAT, tp=1),
    "flat tp2 to tp1 with rng": pair(replaced(FLAT, no_load_rng=False), tp=1),
    "flat same layout": pair(replaced(FLAT, no_load_rng=False)),
    "flat tp2 to pp2": pair(FLAT, tp=1, pp=2),
    "flat dp2 to dp4": pair(replaced(FLAT, tp=1, dp=2), dp=4),
    "flat without gates tp2 to tp1": pair(replaced(FLAT, gated=False), tp=1),
    "flat ep2 to ep1": pair(replaced(MOE, sharding="fully_sharded_model_space"), ep=1, no_load_rng=True),
    "flat vocabulary grows with tp": pair(replaced(FLAT, tp=1, vocab=17), tp=2),
    "plain optimizer tp2 to tp1": pair(replaced(DENSE, distributed=False, sharding=""), tp=1),
    "plain optimizer ep2 to ep1": pair(replaced(MOE, distributed=False, sharding=""), ep=1),
    "experts ep2 to ep1": pair(MOE, ep=1),
    "experts ep1 to ep2": pair(replaced(MOE, ep=1), ep=2),
    "experts ep2 to ep4": pair(MOE, ep=4, dp=4),
    "experts ep2 to ep1 without rng": pair(MOE, ep=1, no_load_rng=True),
    "experts ep1 to ep2 without rng": pair(replaced(MOE, ep=1), ep=2, no_load_rng=True),
    "experts ep2 to ep4 without rng": pair(MOE, ep=4, dp=4, no_load_rng=True),
    "plain optimizer ep2 to ep1 without rng": pair(
        replaced(MOE, distributed=False, sharding=""), ep=1, no_load_rng=True
    ),
    "plain optimizer tp2 to tp1 without rng": pair(
        replaced(DENSE, distributed=False, sharding=""), tp=1, no_load_rng=True
    ),
    "experts ep2 to ep1 without optimizer": pair(MOE, ep=1, no_load_optim=True),
    "experts ep2 to ep1 without both": pair(MOE, ep=1, no_load_optim=True, no_load_rng=True),
    "experts ep2 dp2 to dp4": pair(MOE, dp=4),
    "experts ep2 dp2 to dp4 without rng": pair(MOE, dp=4, no_load_rng=True),
    "experts tp2 etp2 to etp1": pair(replaced(MOE, tp=2, dp=2, etp=2), etp=1),
    "experts tp2 ep2 to tp1 ep2": pair(replaced(MOE, tp=2, dp=1, etp=1), tp=1, dp=2),
    "experts in the second stage only to pp1": pair(
        replaced(MOE, ep=2, pp=2, dp=2, layers=4, moe_freq=(0, 0, 1, 1)), pp=1
    ),
    "experts in the second stage only to dp4": pair(
        replaced(MOE, ep=1, pp=2, dp=1, layers=4, moe_freq=(0, 0, 1, 1)), pp=1
    ),
    "rerun same layout": pair(replaced(DENSE, rerun=True)),
    "rerun dp1 to dp2": pair(replaced(DENSE, rerun=True), dp=2),
    "same layout without random states": pair(replaced(DENSE, no_save_rng=True)),
    "same layout without random states, told so": pair(replaced(DENSE, no_save_rng=True), no_load_rng=True),
    "same layout without optimizer": pair(replaced(DENSE, no_save_optim=True)),
    "tp2 to tp1 without optimizer": pair(replaced(DENSE, no_save_optim=True), tp=1),
    "tp2 to tp1 without optimizer, told so": pair(replaced(DENSE, no_save_optim=True), tp=1, no_load_optim=True),
    "experts ep2 dp4 as it was": pair(replaced(MOE, dp=4)),
    "experts ep1 etp2 to etp1": pair(replaced(MOE, ep=1, tp=2, etp=2, dp=1), etp=1),
    "experts ep1 etp1 as it was": pair(replaced(MOE, ep=1, tp=2, etp=1, dp=1)),
    "experts ep1 to tp2 ep1": pair(replaced(MOE, ep=1, etp=1, dp=1), tp=2, etp=2),
    "same layout": pair(DENSE),
    "no arguments tp2 to tp1": pair(replaced(DENSE, checkpoint_args=False), tp=1),
    "no arguments same layout": pair(replaced(DENSE, checkpoint_args=False)),
    "heads not divisible": pair(replaced(DENSE, tp=1), tp=3),
    "layers not divisible by pp": pair(replaced(DENSE, tp=1), pp=3),
    "layers not divisible by vpp": pair(replaced(DENSE, tp=1, layers=6), pp=2, vpp=2),
    "experts not divisible": pair(MOE, ep=3, dp=3),
}

SINCE = {
    "fully_reshardable": ((0, 15), (9, 9)),
    "dp_reshardable": ((0, 15), (9, 9)),
    "fully_sharded_model_space": ((0, 6), (0, 14)),
    "dp_zero_gather_scatter": ((0, 6), (9, 9)),
    "": ((0, 6), (9, 9)),
}
"""The versions that write each form."""


def saved_here(name: str) -> bool:
    """Whether this version of megatron-core writes what the pair loads."""
    first, last = SINCE[PAIRS[name][0].sharding]
    return first <= VERSION <= last


def drive(name: str, out: Path, saved_by: Path | None) -> dict[str, Any]:
    """Save, unless another version did, and load."""
    saved, loaded = PAIRS[name]
    result = {"saved": dataclasses.asdict(saved), "loaded": dataclasses.asdict(loaded)}
    folder = (saved_by or out) / name.replace(" ", "_")
    kept = folder.with_suffix(".pieces")
    if saved_by is None:
        answers = run(saved, save, folder)
        if any(answer is None for answer in answers):
            return {**result, "unsaved": True}
        torch.save([piece for answer in answers for piece in answer], kept)
    return {**result, **outcome_of_load(torch.load(kept, weights_only=False), loaded, folder)}


def outcome_of_load(pieces: list[Piece], loaded: Job, folder: Path) -> dict[str, Any]:
    """Load what lies in the folder."""
    results = run(loaded, load, folder)
    raised = {rank: result["raised"] for rank, result in enumerate(results) if result and "raised" in result}
    if raised or any(result is None for result in results):
        stages = {result["stage"] for result in results if result and "stage" in result}
        return {"raised": raised or {-1: "no answer"}, "stage": "/".join(sorted(stages))}
    found = compared(pieces, [piece for result in results for piece in result["pieces"]])
    return {
        "raised": {},
        "differences": found,
        "rng": sorted({result["rng"] for result in results}),
        "schedule": all(result["schedule"] for result in results),
        "steps": [result["steps"] for result in results],
    }


def main() -> None:
    """Drive the pairs that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("pairs", nargs="*", help="names; all that this version can write without any")
    parser.add_argument("--saved-by", type=Path, help="the OUT of another version, whose checkpoints are loaded")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # a rank, which is a fork, would copy what is imported to look for garbage in it
    rows = {}
    for name in options.pairs or PAIRS:
        if options.saved_by is None and not saved_here(name):
            continue
        rows[name] = drive(name, options.out, options.saved_by)
        raised = rows[name].get("raised") or {}
        shown = next(iter(raised.values()), "") or {k: rows[name].get(k) for k in ("differences", "rng", "schedule")}
        print(f"{name}: {shown}", flush=True)
        written = {"version": package_info.__version__, "through": "Megatron-LM" if checkpointing else "the library"}
        written["saved_by"] = str(options.saved_by or "")
        (options.out / "outcomes.json").write_text(json.dumps({**written, "pairs": rows}, indent=1))
    gc.unfreeze()


if __name__ == "__main__":
    main()
