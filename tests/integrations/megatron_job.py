"""Saves three steps with Megatron-LM's own `save_checkpoint` on a CPU: `megatron_job.py RUN CUT [ARGUMENT ...]`.

CUT is the step of which a file is cut before the check, 0 for none; the arguments are Megatron's. Needs a checkout of
Megatron-LM on PYTHONPATH. What asks for a GPU is replaced; what saves is not.
"""

import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.override = typing_extensions.override  # type: ignore[attr-defined] # Megatron-LM wants Python 3.12 for it

WORDS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 1 --train-iters 3 --lr 1e-3 --save-interval 1 --eval-iters 0 --distributed-backend gloo
--vocab-size 64 --tokenizer-type NullTokenizer --mock-data --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-dropout-fusion
--no-bias-gelu-fusion --no-rope-fusion --no-save-rng --no-save-optim"""


def main() -> None:
    import torch

    run, cut, *words = sys.argv[1:]
    sys.argv[1:] = ["--save", run, *WORDS.split(), *words]
    torch.cuda.get_rng_state, torch.cuda.synchronize = torch.get_rng_state, lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10)  # type: ignore[assignment]

    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.training import async_utils, get_args, training
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from ckptlint.integrations import megatron as hook

    check = hook.check_saved

    def check_damaged(path: str, **options: Any) -> Any:
        if int(path[-7:]) == int(cut):
            file = next(file for file in sorted(Path(path).rglob("*")) if file.suffix in (".distcp", ".pt"))
            os.truncate(file, file.stat().st_size - 2000)
        return check(path, **options)

    hook.check_saved = check_damaged
    hook.patch_megatron()
    parse_and_validate_args()
    initialize_megatron(allow_no_cuda=True, skip_random_seed=True)
    args = get_args()
    mpu.initialize_model_parallel(args.tensor_model_parallel_size)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    config = TransformerConfig(tensor_model_parallel_size=args.tensor_model_parallel_size, **sizes)
    model = GPTModel(config, get_gpt_layer_local_spec(), args.padded_vocab_size, max_sequence_length=16)
    args.freeze_all_layers = os.environ.get("FREEZE") == "1"
    for step in (1, 2, 3):
        training.save_checkpoint(step, [model], None, None, 0, checkpointing_context={})
        async_utils.maybe_finalize_async_save(blocking=True, terminate=step == 3)


if __name__ == "__main__":
    main()
