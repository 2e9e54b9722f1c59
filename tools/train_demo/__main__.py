"""`python -m tools.train_demo STEP`: the steps from nothing to the shipped checkpoint, each a command.

`tokenizer` and `prepare` run on any machine and need deepseek-recipe; `backbone` and `drafts` need only torch and the
prepared folder, so they can run elsewhere; `finish` puts the shipped folder together.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from flashmesh.kernels.config import ModelConfig
from flashmesh.kernels.engram import token_map
from flashmesh.kernels.tensor_names import tensors
from tools.train_demo.backbone import Plan, Trainer
from tools.train_demo.batches import Supply
from tools.train_demo.drafts import DraftTrainer
from tools.train_demo.export import export
from tools.train_demo.losses import loss
from tools.train_demo.network import Network
from tools.train_demo.packing import Documents, Hasher
from tools.train_demo.parameters import initial, kinds, rounded
from tools.train_demo.sizes import trained_config

WORK = Path(".flashmesh/train-demo")
CHECKPOINT = Path("flashmesh/data/demo")
BUILT_IN_TOKENIZER = Path("flashmesh/data/tokenizer.json")
ROW_TOKENS = 1024
CHAT_ROWS, CODE_ROWS = 60, 4
SEED = 7


def make_tokenizer(args: argparse.Namespace) -> None:
    """Trains the tokenizer."""
    from tools.train_demo.tokenizer import train

    args.work.mkdir(parents=True, exist_ok=True)
    train(BUILT_IN_TOKENIZER).save(str(args.work / "tokenizer.json"), pretty=False)


def prepare(args: argparse.Namespace) -> None:
    """Draws, renders and stores the training data."""
    from tools.train_demo import evaluation
    from tools.train_demo.chats.chat import Renderer
    from tools.train_demo.corpus import conversations, source_code

    tokenizer = args.work / "tokenizer.json"
    renderer, held_out = Renderer(tokenizer), evaluation.draw(tokenizer)
    evaluation.write(args.work / "evaluation.json", evaluation.describe(held_out, renderer))
    for name, documents in (
        ("held-out-chats", evaluation.answers(held_out, renderer)),
        ("held-out-code", held_out.code),
        ("chats", conversations(tokenizer, args.chats, seed=SEED)),
        ("code", source_code(tokenizer, held_out=False)),
    ):
        np.savez_compressed(args.work / f"{name}.npz", tokens=documents.tokens, ends=documents.ends)
        print(f"{name}: {len(documents):,} documents, {len(documents.tokens):,} tokens")


def train_backbone(args: argparse.Namespace) -> None:
    """Trains the backbone from the start, or from the last saved state with --resume."""
    run = _Run(args)
    masters = run.masters(drafts=False)
    trainer = Trainer(run.net, masters, run.plan)
    state = args.work / "backbone-state.pt"
    if args.resume:
        trainer.load(state)
    trainer.run(run.supply().ahead(SEED + trainer.step), args.out)
    trainer.save(state)
    (args.out / "losses.json").write_text(json.dumps(run.losses(masters)))


def train_drafts(args: argparse.Namespace) -> None:
    """Trains the drafts on the saved backbone, then writes the checkpoint."""
    run = _Run(args)
    state = torch.load(args.work / "backbone-state.pt", map_location=args.device)
    masters: dict[str, torch.Tensor] = state["masters"]
    with torch.no_grad():
        backbone = rounded(masters, kinds(run.config), weights=True)
    drafts = run.masters(drafts=True)
    DraftTrainer(run.net, backbone, drafts, run.plan).run(run.supply().ahead(SEED - 1), args.out)
    export(args.out / "checkpoint", run.raw, run.tokenizer.to_str(), masters | drafts)


def finish(args: argparse.Namespace) -> None:
    """Counts the baseline and puts checkpoint, held-out set and losses into the shipped folder."""
    from tools.train_demo import evaluation
    from tools.train_demo.ngram import NGram

    config = ModelConfig.load(args.out / "checkpoint")
    size = sum(math.prod(spec.shape) for spec in tensors(config))
    baseline = NGram([_documents(args.work / f"{name}.npz") for name in ("chats", "code")], size)
    held_out = json.loads((args.work / "evaluation.json").read_text(encoding="utf-8"))
    held_out["losses"] = {
        "trained": json.loads((args.out / "losses.json").read_text())["trained"],
        "ngram": {
            name: baseline.loss(_documents(args.work / f"held-out-{name}.npz"))
            for name in ("chats", "code")
        },
    }
    shutil.copytree(args.out / "checkpoint", CHECKPOINT, dirs_exist_ok=True)
    evaluation.write(CHECKPOINT / "evaluation.json", held_out)


class _Run:
    """What both trainings need, from the prepared folder and the arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_float32_matmul_precision("high")
        args.out.mkdir(parents=True, exist_ok=True)
        self._args = args
        self.tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
        self.raw = trained_config(self.tokenizer)
        self.config = ModelConfig.from_dict(self.raw)
        product = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.net = Network(self.config, product=product, device=args.device)
        self.plan = Plan(num_steps=args.steps, device=args.device, compiled=args.compile)

    def masters(self, *, drafts: bool) -> dict[str, torch.Tensor]:
        """Draws the starting values of the backbone, or of the drafts."""
        return {
            name: value.to(self._args.device)
            for name, value in initial(self.config, seed=SEED).items()
            if name.startswith("mtp.") == drafts
        }

    def supply(self) -> Supply:
        """Opens the prepared data."""
        sources = [
            (_documents(self._args.work / f"{name}.npz"), count)
            for name, count in (("chats", self._args.chat_rows), ("code", self._args.code_rows))
        ]
        table = token_map(self.tokenizer, self.config.vocab_size)
        return Supply(self.config, table, sources, self._args.row_tokens)

    @torch.no_grad()
    def losses(self, masters: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
        """Returns the loss on held-out chats and code in fp32, of the masters and of what a checkpoint stores."""
        torch.set_float32_matmul_precision("highest")
        device = self._args.device
        net = Network(self.config, product=torch.float32, device=device)
        hasher = Hasher(self.config, token_map(self.tokenizer, self.config.vocab_size))
        found = {}
        for stored in (False, True):
            weights = rounded(masters, kinds(self.config), weights=stored)
            found["stored" if stored else "trained"] = {
                name: loss(net, weights, hasher, _documents(path), device)
                for name in ("chats", "code")
                for path in (self._args.work / f"held-out-{name}.npz",)
            }
        return found


def _documents(path: Path) -> Documents:
    with np.load(path) as stored:
        return Documents(stored["tokens"], stored["ends"])


def main() -> None:
    """Parses and runs."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    steps = parser.add_subparsers(metavar="STEP", required=True)
    for name, act in (
        ("tokenizer", make_tokenizer),
        ("prepare", prepare),
        ("backbone", train_backbone),
        ("drafts", train_drafts),
        ("finish", finish),
    ):
        step = steps.add_parser(name, help=act.__doc__, description=act.__doc__)
        step.add_argument("--work", type=Path, default=WORK, metavar="FOLDER")
        step.set_defaults(act=act)
        if name == "prepare":
            step.add_argument("--chats", type=int, default=700_000, metavar="N")
        if name in ("backbone", "drafts", "finish"):
            step.add_argument("--out", type=Path, default=WORK, metavar="FOLDER")
        if name == "backbone":
            step.add_argument("--resume", action="store_true", help="go on from the saved state")
        if name in ("backbone", "drafts"):
            step.add_argument("--steps", type=int, required=True, metavar="N")
            step.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
            step.add_argument("--compile", action="store_true")
            step.add_argument("--row-tokens", type=int, default=ROW_TOKENS, metavar="N")
            step.add_argument("--chat-rows", type=int, default=CHAT_ROWS, metavar="N")
            step.add_argument("--code-rows", type=int, default=CODE_ROWS, metavar="N")
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    main()
