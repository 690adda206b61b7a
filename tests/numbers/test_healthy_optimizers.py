"""Real training with many optimizers, in many legal ways: no law of the numbers of one step is said to be broken."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import SWEEP, found, report_on
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

OF_NUMBERS = {"OPT010", "OPT011", "OPT012", "OPT013", "PAY016", "PAY017", "PAY018", "PAY019", "PAY020"}
VOCABULARY, UNSEEN, WIDTH, LAYERS, STEPS = 48, 8, 16, 4, 40
SEED = 78

Optimizers = list[torch.optim.Optimizer]
Make = Callable[[list[nn.Parameter]], Optimizers]

pytestmark = pytest.mark.sweep


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            setattr(self, f"{name}_proj", nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, f"{name}_proj")(x).unsqueeze(1) for name in "qkv")
        mixed: Tensor = self.o_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return mixed


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(functional.silu(self.up_proj(x)))
        return made


class Experts(nn.Module):
    """Four experts of which one token reaches one; the last is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x)[..., :3].softmax(-1).max(-1, keepdim=True)
        made = [expert(x) * weight * (chosen == number) for number, expert in enumerate(self.experts[:3])]
        return torch.stack(made).sum(0)


class Layer(nn.Module):
    def __init__(self, has_experts: bool = False) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(), Attention()
        self.post_attention_layernorm, self.mlp = Norm(), Experts() if has_experts else Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Decoder(nn.Module):
    def __init__(self, has_experts: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(has_experts) for _ in range(LAYERS))
        self.norm, self.lm_head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.lm_head(self.norm(x))
        return made


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return made


def of_all(kind: Any, **settings: Any) -> Make:
    return lambda params: [kind(params, **settings)]


def muon(params: list[nn.Parameter]) -> Optimizers:
    """Matrices by Muon, the rest by AdamW, as it is used."""
    matrices = [param for param in params if param.dim() == 2 and len(param) != VOCABULARY]
    others = [param for param in params if param.dim() != 2 or len(param) == VOCABULARY]
    made: Optimizers = [torch.optim.Muon(matrices, lr=1e-2)] if matrices else []
    return [*made, torch.optim.AdamW(others, lr=3e-3)] if others else made


OPTIMIZERS: dict[str, Make] = {
    "AdamW": of_all(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "AdamW 0.999": of_all(torch.optim.AdamW, lr=3e-3),
    "Adam": of_all(torch.optim.Adam, lr=3e-3),
    "amsgrad": of_all(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), amsgrad=True),
    "NAdam": of_all(torch.optim.NAdam, lr=3e-3),
    "RAdam": of_all(torch.optim.RAdam, lr=3e-3),
    "Adamax": of_all(torch.optim.Adamax, lr=3e-3),
    "Adafactor": of_all(torch.optim.Adafactor, lr=1e-2),
    "Adagrad": of_all(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": of_all(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "RMSprop plain": of_all(torch.optim.RMSprop, lr=1e-3),
    "Adadelta": of_all(torch.optim.Adadelta, lr=1.0),
    "SGD": of_all(torch.optim.SGD, lr=0.1, momentum=0.9),
    "ASGD": of_all(torch.optim.ASGD, lr=0.1),
    "Rprop": of_all(torch.optim.Rprop, lr=1e-3),
    "Muon": muon,
}


def train(
    model: nn.Module,
    make: Make,
    steps: int = STEPS,
    rate: Callable[[int], float] = lambda _: 1.0,
    each: Callable[[int, Optimizers], None] = lambda *_: None,
) -> Optimizers:
    """The optimizers after some steps.

    Args:
        rate: what the rate is multiplied with at a step, from 0 on.
        each: called before each step.
    """
    optimizers = make([param for param in model.parameters() if param.requires_grad])
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    follows = torch.randint(0, VOCABULARY - UNSEEN, (VOCABULARY,))
    for step in range(steps):
        for optimizer, of_groups in zip(optimizers, rates, strict=True):
            for group, usual in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = usual * rate(step)
        each(step, optimizers)
        tokens = torch.randint(0, VOCABULARY - UNSEEN, (8, 1))
        for _ in range(8):
            tokens = torch.cat([tokens, follows[tokens[:, -1:]]], 1)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


Trained = tuple[nn.Module, Optimizers, int, dict[str, Any]]
"""The model, its optimizers, the steps it took, and what is saved beside them."""


def plain(make: Make) -> Trained:
    model = Decoder()
    return model, train(model, make), STEPS, {}


def sixteen_bits(dtype: torch.dtype) -> Callable[[Make], Trained]:
    def case(make: Make) -> Trained:
        def with_room(step: int, optimizers: Optimizers) -> None:  # 1e-8 is 0 in float16
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group |= {"eps": 1e-4} if dtype == torch.float16 and isinstance(group.get("eps"), float) else {}

        model = Decoder().to(dtype)
        return model, train(model, make, each=with_room), STEPS, {}

    return case


def first_step(make: Make) -> Trained:
    model = Decoder()
    return model, train(model, make, steps=1), 1, {}


def at_rates(rate: Callable[[int], float]) -> Callable[[Make], Trained]:
    def case(make: Make) -> Trained:
        model = Decoder()
        return model, train(model, make, rate=rate), STEPS, {}

    return case


def second_betas(second: Callable[[int], float]) -> Callable[[Make], Trained]:
    def case(make: Make) -> Trained:
        def change(step: int, optimizers: Optimizers) -> None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group |= {"betas": (0.9, second(step))} if "betas" in group else {}

        model = Decoder()
        return model, train(model, make, each=change), STEPS, {}

    return case


def frozen_layers(make: Make) -> Trained:
    model = Decoder()
    train(model, OPTIMIZERS["AdamW"], steps=5)
    model.layers[:2].requires_grad_(False)
    model.embed_tokens.requires_grad_(False)
    return model, train(model, make), STEPS, {}


def frozen_from_16_bits(make: Make) -> Trained:
    """A base that was loaded in bfloat16, of which one layer is trained on."""
    model = Decoder().bfloat16().float().requires_grad_(False)
    model.layers[1].requires_grad_(True)
    return model, train(model, make), STEPS, {}


def lora(make: Make) -> Trained:
    model = Decoder().requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model, train(model, make), STEPS, {}


def experts(make: Make) -> Trained:
    model = Decoder(has_experts=True)
    return model, train(model, make), STEPS, {}


def upcycled(make: Make) -> Trained:
    """A dense model whose experts are copies of its own mlp."""
    model = Decoder(has_experts=True)
    for layer in model.layers:
        for expert in layer.mlp.experts[1:]:
            expert.load_state_dict(layer.mlp.experts[0].state_dict())
    return model, train(model, make), STEPS, {}


def tied(make: Make) -> Trained:
    model = Decoder()
    model.lm_head.weight = model.embed_tokens.weight
    return model, train(model, make), STEPS, {}


def shared_layers(make: Make) -> Trained:
    """Saved without the optimizer, whose states are stored once."""
    model = Decoder()
    model.layers[2], model.layers[3] = model.layers[0], model.layers[1]
    train(model, make)
    return model, [], STEPS, {}


def stacked_twice(steps: int, rate: Callable[[int], float] = lambda _: 1.0) -> Callable[[Make], Trained]:
    def case(make: Make) -> Trained:
        model = Decoder()
        train(model, OPTIMIZERS["AdamW"], steps=10)
        model.layers = nn.ModuleList([*model.layers, *copy.deepcopy(model.layers)])
        return model, train(model, make, steps=steps, rate=rate) if steps else [], steps, {}

    return case


def average_beside(make: Make) -> Trained:
    model = Decoder()
    average = copy.deepcopy(model)

    def follow(step: int, optimizers: Optimizers) -> None:
        with torch.no_grad():
            for of_average, param in zip(average.parameters(), model.parameters(), strict=True):
                of_average.lerp_(param, 0.01 if step else 1.0)

    optimizers = train(model, make, each=follow)
    return model, optimizers, STEPS, {"ema": average.state_dict()}


def changed_after(change: Callable[[Tensor], Tensor]) -> Callable[[Make], Trained]:
    def case(make: Make) -> Trained:
        model = Decoder()
        optimizers = train(model, make)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(change(param))
        return model, optimizers, STEPS, {}

    return case


CASES: dict[str, Callable[[Make], Trained]] = {
    "plain": plain,
    "bfloat16": sixteen_bits(torch.bfloat16),
    "float16": sixteen_bits(torch.float16),
    "first step": first_step,
    "rate 0": at_rates(lambda _: 0.0),
    "warm-up": at_rates(lambda step: min(1.0, step / 30)),
    "decay to 0": at_rates(lambda step: 1 - step / (STEPS - 1)),
    "other betas for a while": second_betas(lambda step: 0.95 if 15 <= step < 39 else 0.999),
    "lower beta at last": second_betas(lambda step: 0.999 if step < 39 else 0.95),
    "frozen layers": frozen_layers,
    "frozen from 16 bits": frozen_from_16_bits,
    "lora": lora,
    "experts": experts,
    "upcycled": upcycled,
    "tied": tied,
    "shared layers": shared_layers,
    "stacked, fresh": stacked_twice(0),
    "stacked, first step at rate 0": stacked_twice(1, lambda _: 0.0),
    "stacked and trained": stacked_twice(STEPS),
    "average beside": average_beside,
    "pruned": changed_after(lambda param: param * (param.abs() > param.abs().median()) if param.dim() == 2 else param),
    "rounded": changed_after(lambda param: param.bfloat16().float()),
}


def combinations() -> Iterator[tuple[str, str]]:
    """(optimizer, case): all with OPTIMIZERS=all, a tenth of them in a sweep, else a third of one for each of both."""
    draw = random.Random(SEED)
    every = [(name, case) for name in OPTIMIZERS for case in CASES]
    if SWEEP or os.environ.get("OPTIMIZERS") == "all":
        yield from every if "OPTIMIZERS" in os.environ else draw.sample(every, len(every) // 10)
        return
    cases = [case for case in CASES if case != "plain"]
    each = [(name, "plain") for name in OPTIMIZERS] + [(draw.choice([*OPTIMIZERS]), case) for case in cases]
    yield from draw.sample(each, len(each) // 3)


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize(("name", "case"), [*combinations()], ids=lambda text: text.replace(" ", "_"))
def test_training_breaks_no_law(name: str, case: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model, optimizers, steps, beside = CASES[case](OPTIMIZERS[name])
    torch.set_num_threads(threads)
    state, of_optimizers = get_state_dict(model, optimizers) if optimizers else (model.state_dict(), {})
    step = tmp_path / f"step-{steps}"
    saved = {"model": state} | ({"optim": of_optimizers} if of_optimizers else {}) | beside
    dcp.save(saved, checkpoint_id=step, no_dist=True)
    assert all(bool(param.isfinite().all()) for param in model.parameters()), "not a healthy run"
    for depth in ("headers", "data"):
        loud = [item for item in found(report_on(step, depth=depth), "error", "warning") if item[0] in OF_NUMBERS]
        assert loud == [], depth
