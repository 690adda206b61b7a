"""The kinds of bench/evidence/healthy.py that need more than torch: transformers, Lightning, accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from healthy import OPTIMIZERS, WORDS, Dice, Steps, model_of, named, numbers, scheduler_of, trained


def trainer(run: Path, dice: Dice) -> Steps:
    """Steps of transformers' Trainer, and the model that is saved beside them in the end."""
    import transformers as hf

    texts = [{"input_ids": [1, 5, 7, 9], "labels": [1, 5, 7, 9], "attention_mask": [1] * 4}] * 8
    every = dice.randint(1, 9)
    arguments = hf.TrainingArguments(run, max_steps=every * dice.randint(1, 3) + dice.choice([0, 0, 1]),
        save_steps=every, save_strategy="steps", eval_strategy=(judged := dice.choice(["no", "steps"])),
        eval_steps=every, load_best_model_at_end=judged == "steps" and dice.random() < 0.5,
        save_total_limit=dice.choice([None, 1, 2]), optim=dice.choice(["adamw_torch", "sgd", "adafactor",
        "rmsprop", "adagrad"]), save_only_model=dice.random() < 0.1,
        lr_scheduler_type=dice.choice(["linear", "cosine", "constant_with_warmup", "polynomial",
        "inverse_sqrt"]), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=dice.choice([1, 2]), bf16=False,
        seed=dice.randint(0, 99))  # fmt: skip
    own = hf.Trainer(tiny(dice), arguments, train_dataset=texts, eval_dataset=texts,
        processing_class=tokenizer() if dice.random() < 0.6 else None)  # fmt: skip
    own.train()
    if dice.random() < 0.5:
        dice.choice([own.save_model, own.save_state, lambda: own.save_model(str(run / "final"))])()
    return {path: int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*")}


def tiny(dice: Dice) -> Any:
    """A small causal model of a random type of transformers."""
    import transformers as hf

    kind = dice.choice(["llama", "gpt2", "qwen2", "qwen3", "mistral", "opt", "gpt_neox", "bloom", "gemma",
        "phi", "mixtral", "qwen2_moe", "olmo2", "bart", "t5"])  # fmt: skip
    width = dice.choice([16, 32])
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": dice.randint(1, 3),
        "vocab_size": 40, "num_attention_heads": 4, "num_key_value_heads": dice.choice([2, 4]), "head_dim":
        width // 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings":
        dice.random() < 0.5, "decoder_start_token_id": 0}  # fmt: skip
    sizes |= {"bart": {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}, "t5": {"d_kv": 4,
        "d_ff": 24, "num_decoder_layers": 1}, "opt": {"ffn_dim": 24, "word_embed_proj_dim": width},
        "mixtral": {"num_local_experts": 4}, "gpt2": {"n_inner": 24}, "qwen2_moe": {"num_experts": 4,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}}.get(kind, {})  # fmt: skip
    if kind in ("bloom", "t5"):
        sizes.pop("head_dim")
    auto = hf.AutoModelForSeq2SeqLM if kind in ("bart", "t5") else hf.AutoModelForCausalLM
    return auto.from_config(hf.AutoConfig.for_model(kind, **sizes))


def tokenizer() -> Any:
    """A tokenizer of a few words."""
    import tokenizers
    import transformers as hf

    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def pretrained(run: Path, dice: Dice) -> Steps:
    """Models of `save_pretrained`, in one file or in shards."""
    name, seed, steps = named(dice), dice.random(), {}
    size, dtype = dice.choice(["5KB", "20KB", "5GB"]), getattr(torch, dice.choice(["float32", "bfloat16", "float16"]))
    for number in numbers(dice, dice.randint(1, 3)):
        model = tiny(Dice(seed)).to(dtype)
        model.save_pretrained(path := run / name(number), max_shard_size=size)
        tokenizer().save_pretrained(path)
        steps[path] = number
    return steps


def lightning(run: Path, dice: Dice) -> Steps:
    """The files of Lightning's ModelCheckpoint."""
    import lightning as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": 0.1})
            self.net = model_of(dice)

        def training_step(self, batch: Any, _: int) -> Any:
            self.log("loss", loss := batch[0].mean() * sum(one.sum() for one in self.parameters()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = getattr(torch.optim, name)(self.parameters(), 1e-3)
            return {"optimizer": optimizer, "lr_scheduler": scheduler_of(dice, optimizer)} if scheduled else optimizer

    name, scheduled, word = dice.choice(OPTIMIZERS), dice.random() < 0.5, dice.choice(WORDS)
    pattern = dice.choice([None, "{epoch}-{step}", "{epoch:02d}-{loss:.2f}", word + "-{step}", "{step}",
        word + "_{epoch}_{step}", "{epoch}-{loss:.4f}-" + word, word + "-{epoch:03d}"])  # fmt: skip
    keeping = ModelCheckpoint(dice.choice([None, run, run / "checkpoints"]), pattern,
        monitor=dice.choice([None, "loss"]), save_last=dice.choice([None, True, "link"]), save_top_k=-1 if
        (several := dice.random() < 0.6) else 1, every_n_epochs=1, auto_insert_metric_name=dice.random() <
        0.7, save_weights_only=dice.random() < 0.1)  # fmt: skip
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 4)), 2)
    pl.Trainer(accelerator="cpu", max_epochs=dice.randint(1, 3 + several), callbacks=[keeping],
        default_root_dir=run, logger=dice.choice([False, True]), enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1).fit(Module(), data)  # fmt: skip
    return {path: torch.load(path, weights_only=False)["global_step"] for path in run.rglob("*.ckpt")}


def accelerate(run: Path, dice: Dice) -> Steps:
    """Folders of accelerate's `save_state`, which it names itself or which are named here."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    class Meter:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 5, "best": 0.25}

        def load_state_dict(self, _: dict[str, Any]) -> None: ...

    automatic, name = dice.random() < 0.5, named(dice)
    own = Accelerator(cpu=True, project_config=ProjectConfiguration(str(run),
        automatic_checkpoint_naming=automatic, total_limit=dice.choice([None, 2])))  # fmt: skip
    moving: list[Any] = []
    for _ in range(dice.choice([1, 1, 2])):
        model = model_of(dice)
        moving += [optimizer := trained(dice, model)]
        moving += [scheduler_of(dice, optimizer)] if dice.random() < 0.6 else []
        own.prepare(model, *moving[-2:])
    own.register_for_checkpointing(*[Meter() for _ in range(dice.choice([0, 0, 1, 2]))])
    is_safe, steps = dice.random() < 0.7, {}
    for index, number in enumerate(numbers(dice, dice.randint(1, 3))):
        for one in moving * 3:
            one.step()
        path = Path(own.save_state(None if automatic else str(run / name(number)), safe_serialization=is_safe))
        steps[path] = index if automatic else number
    return {path: number for path, number in steps.items() if path.exists()}


KINDS = {trainer: "transformers", pretrained: "transformers", lightning: "lightning", accelerate: "accelerate"}
"""Kind -> the library that it needs."""
