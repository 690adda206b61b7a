"""What megatron-core itself says about models of random arguments: keys and shapes of its sharded_state_dict, as JSON.

One process per version of megatron-core, on the CPU and without a GPU library; `megatron.py` starts it and fits the
table to what it says. Transformer Engine and mamba_ssm need CUDA, so their modules are stood in for by ones that only
register parameters, under the names and with the shapes of the real ones; all that makes keys of them, the wrappers in
`megatron.core.extensions.transformer_engine` and the mixers, is megatron-core's own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import random
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]  # where megatron.py lies
sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures" / "make"))
warnings.simplefilter("ignore")

# ---------------------------------------------------------------- stand-ins for what needs CUDA


class _Norm(torch.nn.Module):
    def __init__(
        self, normalized_shape: int | None = None, *args: Any, hidden_size: int | None = None, **kwargs: Any
    ) -> None:  # fmt: skip
        super().__init__()
        self.size = normalized_shape or hidden_size
        self.weight = torch.nn.Parameter(torch.empty(self.size))


class _LayerNorm(_Norm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.empty(self.size))


class _Linear(torch.nn.Module):
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, tp_size: int = 1,
        parallel_mode: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parallel_mode, self.tp_size, self.use_bias = parallel_mode, tp_size, bias
        self.in_features, self.out_features, self.num_gemms = in_features, out_features, kwargs.get("num_gemms", 1)
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self._add(rows, columns, bias)

    fp8, fp8_calibration = False, False
    fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}  # noqa: RUF012  nobody changes it

    def get_extra_state(self) -> torch.Tensor:
        """What fp8 training would need."""
        return torch.empty(0)

    def _add(self, rows: int, columns: int, bias: bool) -> None:
        self.weight = torch.nn.Parameter(torch.empty(rows, columns))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(rows))


class _LayerNormLinear(_Linear):
    def __init__(
        self, in_features: int, out_features: int, *, normalization: str = "LayerNorm", **kwargs: Any
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features))
        if normalization != "RMSNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.empty(in_features))


class _GroupedLinear(_Linear):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, num_gemms=num_gemms, **kwargs)

    def _add(self, rows: int, columns: int, bias: bool) -> None:
        for number in range(self.num_gemms):
            setattr(self, f"weight{number}", torch.nn.Parameter(torch.empty(rows, columns)))
            if bias:
                setattr(self, f"bias{number}", torch.nn.Parameter(torch.empty(rows)))


class _Plain(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Operations(types.ModuleType):
    """Transformer Engine's fusible operations, of which nothing is built."""

    def __getattr__(self, name: str) -> Any:
        return _Plain


_MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.5.0"},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": dict.fromkeys(
        ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
        _Plain,
    )
    | {"Format": types.SimpleNamespace(E4M3=0, HYBRID=1)},
    "transformer_engine.pytorch": {
        "Linear": _Linear,
        "LayerNormLinear": _LayerNormLinear,
        "GroupedLinear": _GroupedLinear,
        "LayerNorm": _LayerNorm,
        "RMSNorm": _Norm,
        "DotProductAttention": _Plain,
        "ops": _Operations("ops"),
    },
    "transformer_engine.pytorch.fp8": {
        "FP8GlobalStateManager": _Plain,
        "fp8_autocast": _Plain,
        "fp8_model_init": _Plain,
    },
    "transformer_engine.pytorch.distributed": {
        "CudaRNGStatesTracker": object,
        "activation_recompute_forward": None,
        "is_fp8_activation_recompute_enabled": None,
    },
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": _Plain},
    "transformer_engine.pytorch.tensor.utils": dict.fromkeys(
        ("cast_master_weights_to_fp8", "replace_raw_data", "post_all_gather_processing")
    ),
    "transformer_engine.pytorch.tensor.mxfp8_tensor": {"MXFP8Tensor": _Plain},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": _Plain},
    "transformer_engine.pytorch.tensor.float8_tensor": {"Float8Tensor": _Plain},
    "transformer_engine.pytorch.cpp_extensions": {"cast_to_fp8": None},
    "transformer_engine.pytorch.module": {},
    "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": _Plain, "get_dummy_wgrad": None},
    "mamba_ssm": {"__version__": "2.2.4"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _Norm},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": None},
    "mamba_ssm.ops.triton.ssd_combined": dict.fromkeys(
        ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), lambda: None
    ),
    "causal_conv1d": {"__version__": "1.5.0", "causal_conv1d_fn": None, "causal_conv1d_update": None},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
}


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `_MODULES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Its spec, a package."""
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in _MODULES else None

    def create_module(self, spec: Any) -> Any:
        """A module of the names."""
        module = types.ModuleType(spec.name)
        module.__dict__.update(_MODULES[spec.name])
        return module

    def exec_module(self, module: Any) -> None:
        """Its modules are attributes of a package, as the real ones import them."""
        for name in _MODULES:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


sys.meta_path.insert(0, _StandIns())

import megatron_cpu  # noqa: E402
from megatron_cpu import CudaToCpu, accepted  # noqa: E402

megatron_cpu.use_cpu()

from megatron.core import package_info, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

VERSION = package_info.__version__

if hasattr(experts, "gg"):  # which needs CUDA too, and to build and name the weights nothing of it is called
    experts.gg.assert_grouped_gemm_is_available = lambda: None

Shapes = dict[str, list[int]]


# ---------------------------------------------------------------- a model of Megatron-LM's arguments


def config_of(args: dict[str, Any], **parallel: Any) -> Any:
    """The TransformerConfig that megatron.training.arguments.core_transformer_config_from_args makes of arguments."""
    mla = args.get("multi_latent_attention", False)
    kind = MLATransformerConfig if mla else TransformerConfig
    same = [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "add_bias_linear",
        "add_qkv_bias",
        "normalization",
        "qk_layernorm",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_grouped_gemm",
        "moe_router_enable_expert_bias",
        "mtp_num_layers",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "multi_latent_attention",
        "moe_latent_size",
        "attention_output_gate",
        "is_hybrid_model",
    ]
    values = {name: args[name] for name in same if name in args}
    values |= {
        "num_query_groups": args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"],
        "gated_linear_unit": args["swiglu"],
        "activation_func": torch.nn.functional.silu if args["swiglu"] else torch.nn.functional.gelu,
        "num_moe_experts": args.get("num_experts"),
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid" if args.get("moe_router_enable_expert_bias") else "softmax",
        "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "variable_seq_lengths": False,
        "apply_rope_fusion": False,
        "rope_type": "rope",
        **parallel,
    }
    return kind(**accepted(kind.__init__, values))


def model_of(args: dict[str, Any], engine: bool, config: Any) -> torch.nn.Module:
    """The part of the model of this rank, as gpt_builders.py and mamba_builders.py of Megatron-LM build it."""
    common = {
        "config": config,
        "vocab_size": args["padded_vocab_size"],
        "max_sequence_length": args["max_position_embeddings"],
        "position_embedding_type": args["position_embedding_type"],
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    if args.get("hybrid_override_pattern"):
        pattern = args["hybrid_override_pattern"]
        try:  # MambaModel until 0.17
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            return HybridModel(hybrid_stack_spec=hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
        except ImportError:
            from megatron.core.models.mamba import MambaModel
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

            return MambaModel(mamba_stack_spec=mamba_stack_spec, hybrid_override_pattern=pattern, **common)
    specs = gpt_layer_specs
    if args.get("num_experts"):
        layer = specs.get_gpt_decoder_block_spec(
            config, **accepted(specs.get_gpt_decoder_block_spec, {
                "use_transformer_engine": engine, "normalization": args["normalization"]})
        )  # fmt: skip
    else:
        make = specs.get_gpt_layer_with_transformer_engine_spec if engine else specs.get_gpt_layer_local_spec
        layer = make(**accepted(make, {
            "num_experts": None,
            "moe_grouped_gemm": False,
            "qk_layernorm": args["qk_layernorm"],
            "multi_latent_attention": args.get("multi_latent_attention", False),
            "normalization": args["normalization"],
        }))  # fmt: skip
    mtp = {}
    if args.get("mtp_num_layers"):
        spec = layer
        if args.get("num_experts"):
            if hasattr(specs, "get_gpt_decoder_layer_specs"):
                make = specs.get_gpt_decoder_layer_specs
                spec = make(config, **accepted(make, {
                    "use_transformer_engine": engine, "normalization": args["normalization"]}))[-1]  # fmt: skip
            elif not layer.layer_specs:
                spec = None
        mtp = {"mtp_block_spec": specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine)}
    return GPTModel(transformer_layer_spec=layer, **mtp, **common)


def shapes(
    args: dict[str, Any], engine: bool, metadata: dict[str, Any], tp: int = 1, pp: int = 1, ep: int = 1
) -> Shapes:
    """Key -> global shape of every tensor that the ranks of a job would save.

    The ranks are played one after the other, in a group that exchanges nothing.

    Raises:
        AssertionError: two ranks, or two chunks of a rank, differ in the shape of a key.
    """
    found: Shapes = {}
    world = max(tp * pp, pp * ep, 1)
    for rank in range(world):
        with _job(rank, world, tp, pp, ep), CudaToCpu():
            parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            parallel |= {"sequence_parallel": tp > 1 and ep > 1}  # which these together ask for
            config = config_of(args, expert_model_parallel_size=ep, expert_tensor_parallel_size=1, **parallel)
            state = model_of(args, engine, config).sharded_state_dict(metadata=filled(metadata))
            apply_factories(state)
            for tensor in nested_values(state):
                if isinstance(tensor, ShardedTensor):
                    shape = list(tensor.global_shape)
                    assert found.setdefault(tensor.key, shape) == shape, (tensor.key, found[tensor.key], shape)
    return found


def filled(metadata: dict[str, Any]) -> dict[str, Any]:
    """Content metadata with the group that newer versions ask it for."""
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


class _job:  # noqa: N801
    """Megatron's groups as one rank of a job sees them."""

    def __init__(self, rank: int, world: int, tp: int, pp: int, ep: int) -> None:
        self.rank, self.world = rank, world
        self.sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        if ep > 1:
            self.sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}

    def __enter__(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=self.rank, world_size=self.world, store=FakeStore())
        known = accepted(parallel_state.initialize_model_parallel, {"create_gloo_process_groups": False})
        with CudaToCpu():
            parallel_state.initialize_model_parallel(**self.sizes, **known)
            model_parallel_cuda_manual_seed(1234)

    def __exit__(self, *raised: object) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


# ---------------------------------------------------------------- random arguments


_KNOWN = frozenset(inspect.signature(MLATransformerConfig.__init__).parameters)
_MAYBE = frozenset({"moe_shared_expert_gate", "moe_latent_size", "attention_output_gate", "add_qkv_bias"})
_MAYBE |= {"mamba_num_heads"}


def arguments(rng: random.Random, family: str) -> dict[str, Any]:
    """Arguments of a small model of a family (`gpt`, `hybrid`), as far as this version knows them."""
    return {name: value for name, value in _arguments(rng, family).items() if name in _KNOWN or name not in _MAYBE}


def _arguments(rng: random.Random, family: str) -> dict[str, Any]:
    # sizes that divide by 4 in two ways only where parallelism asks for it: heads, groups, experts
    sizes = rng.sample([20, 28, 44, 52, 68, 76, 92, 116, 124, 148, 164, 172], 6)
    groups = rng.choice([2, 4])
    heads = groups * rng.choice([1, 3, 5])
    args: dict[str, Any] = {
        "num_layers": rng.choice([2, 4]),
        "hidden_size": sizes[0],
        "ffn_hidden_size": sizes[1],
        "num_attention_heads": heads,
        "group_query_attention": heads != groups or rng.random() < 0.5,
        "num_query_groups": groups,
        "kv_channels": rng.choice([6, 10, 14, 22]),
        "padded_vocab_size": sizes[2],
        "max_position_embeddings": rng.choice([18, 26, 34]),
        "position_embedding_type": rng.choice(["rope", "learned_absolute", "none"]),
        "swiglu": rng.random() < 0.5,
        "add_bias_linear": rng.random() < 0.5,
        "add_qkv_bias": rng.random() < 0.5,
        "normalization": rng.choice(["LayerNorm", "RMSNorm"]),
        "untie_embeddings_and_output_weights": rng.random() < 0.5,
        "qk_layernorm": rng.random() < 0.5,
    }
    if rng.random() < 0.6 or family == "hybrid":
        args["add_bias_linear"] &= rng.random() < 0.5  # which versions before 0.15 refuse
        args |= {
            "num_experts": rng.choice([4, 6, 8]),
            "moe_ffn_hidden_size": sizes[3],
            "moe_grouped_gemm": rng.random() < 0.5,
            "moe_router_enable_expert_bias": rng.random() < 0.5,
            "moe_shared_expert_intermediate_size": rng.choice([None, sizes[4]])
            if not args["add_bias_linear"]
            else None,
            "moe_layer_freq": rng.choice([1, 1, 2, [int(rng.random() < 0.6) for _ in range(args["num_layers"])]]),
        }
        args["moe_shared_expert_gate"] = bool(args["moe_shared_expert_intermediate_size"]) and rng.random() < 0.5
        args["moe_latent_size"] = rng.choice([None, None, 38]) if not args["add_bias_linear"] else None
    if family == "hybrid":
        symbols = [
            rng.choice("MMM*-E" if "moe_latent_size" in _KNOWN else "MM*-") for _ in range(args["num_layers"] + 4)
        ]
        args |= {
            "num_layers": len(symbols),
            "hidden_size": rng.choice([32, 48, 64, 80, 96]),
            "hybrid_override_pattern": "".join(symbols),
            "is_hybrid_model": True,
            "mamba_state_dim": rng.choice([6, 10, 14]),
            "mamba_head_dim": rng.choice([4, 8]),
            "mamba_num_groups": rng.choice([2, 4]),
            "moe_layer_freq": 1,
        }
        args["mamba_num_heads"] = rng.choice([None, args["mamba_num_groups"] * rng.choice([1, 3])])
        return args
    if rng.random() < 0.35:
        args |= {
            "multi_latent_attention": True,
            "q_lora_rank": rng.choice([None, 30, 42]),
            "kv_lora_rank": rng.choice([50, 54]),
            "qk_head_dim": rng.choice([6, 8]),
            "qk_pos_emb_head_dim": rng.choice([2, 4]),
            "v_head_dim": rng.choice([12, 16]),
            "group_query_attention": False,
            "position_embedding_type": "rope",
        }
    else:
        args["attention_output_gate"] = rng.random() < 0.2
    if rng.random() < 0.4:
        args["mtp_num_layers"] = rng.choice([1, 2])
        if args["position_embedding_type"] != "rope":
            args["position_embedding_type"] = "rope"
    return args


NAMINGS: dict[str, dict[str, Any]] = {
    "stacked": {},
    "numbered": {"non_homogeneous_layers": True},
    "split": {"non_homogeneous_layers": True, "singleton_local_shards": True},
}
"""Content metadata of the namings; `split` has been there since 0.14 or so."""


def main() -> None:
    """Write what this version says about random arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NAMINGS, help="one naming")
    parser.add_argument("--family", choices=("gpt", "hybrid"), help="one family; three of four are gpt otherwise")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    probes, refused = [], {}
    for number in range(options.probes):
        family = options.family or ("hybrid" if number % 4 == 3 else "gpt")
        args = arguments(rng, family)
        for engine in (True,) if family == "hybrid" else (False, True):
            for naming, metadata in NAMINGS.items():
                if naming == "split" and not engine and args.get("moe_grouped_gemm"):
                    continue  # all experts of a layer under one key, another one at each size of pp (0.16.1)
                if options.only not in (None, naming):
                    continue
                if naming == "stacked" and args.get("moe_layer_freq", 1) != 1:
                    continue  # layers that differ are numbered
                try:
                    one = shapes(args, engine, metadata)
                except Exception as error:
                    text = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
                    refused[text] = refused.get(text, 0) + 1
                    continue
                probe = {"family": family, "engine": engine, "naming": naming, "args": args, "shapes": one}
                probes.append(probe)
                if number % 3:
                    continue
                meshes = [(2, 1, 1), (1, 2, 1), (2, 2, 1), *[(1, 1, 2)] * bool(args.get("num_experts"))]
                meshes += [(2, 1, 2)] * (engine and bool(args.get("num_experts")))
                mesh = rng.choice(meshes)
                try:
                    many = shapes(args, engine, metadata, *mesh)
                except Exception as error:
                    text = f"{mesh} {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
                    refused[text] = refused.get(text, 0) + 1
                    continue
                probe["mesh"] = mesh
                if one != many:
                    probe["differs"] = [
                        {key: shape for key, shape in some.items() if other.get(key) != shape}
                        for some, other in ((one, many), (many, one))
                    ]
    options.out.write_text(json.dumps({"version": VERSION, "probes": probes, "refused": refused}))
    meshed = [one for one in probes if "mesh" in one]
    print(
        f"{VERSION}: {len(probes)} probes, {len(meshed)} also in parallel, {sum('differs' in o for o in meshed)} differ"
    )
    for text, count in sorted(refused.items(), key=lambda item: -item[1]):
        print(f"  refused {count:4} {text}")


if __name__ == "__main__":
    main()
