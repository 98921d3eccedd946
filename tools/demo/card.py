"""The model card of the demo checkpoint, written from the measured results."""

from collections.abc import Mapping
from typing import Any

from demo.index import SOURCE

from d3serve.model.config import Geometry

TITLES = {
    "all": "all questions", "section": "section, 12 options", "noul": "yes/no", "language": "language",
    "role": "role", "interface": "interface", "summary": "which summary", "name": "which name",
    "depends": "which dependency", "size": "installed size (score)", "needs": "dependencies (score)",
    "needed": "dependents (score)",
}  # fmt: skip

TEXT = """\
---
license: apache-2.0
language: en
---
# demo-d3

A small decision model in the Decision 3.0 package format, trained from scratch on descriptions of Debian packages. It
exists so that d3serve can be tried, tested and shown on a CPU with answers that mean something. It is no general
model: it knows software packages and the questions below, and nothing else.

## What it knows

Given a package's description (text, or a JSON object of its fields), it answers which section of the archive the
package belongs to, yes/no questions about it (a game? a library? for developers? needs a network? …), which language,
role, interface, summary, name or dependency is its own, and scores of size and use. Choices have 2 to 12 options.

## What it does not know

Anything that is not a software package. It reads a state as a bag of words, each beside those before it: negation and
long-range structure are beyond it, and so is much matching of rare names (see the table). Scores of size and use are
little better than guessing: a description hardly tells them. Questions worded far from the
training wordings, more than twelve options, states beyond about 600 tokens and languages other than English were not
trained. Yes/no questions from debtags are as incomplete as the tags.

## How good it is

{held_out} held-out questions; held-out means another *source* package, so that a library and its headers never stand
on both sides. Temperature {temperature} was fitted on the validation split. ECE: 15 bins of equal width.

| questions | number | accuracy | NLL | ECE | accuracy with a causal mask |
| --- | --- | --- | --- | --- | --- |
{rows}

Section among twelve, same states, same options: {baselines}.
Before calibration the ECE over all questions was {uncalibrated:.3f}. Reversing the order of the options changes
{changed:.1%} of the choices ({changed_section:.1%} of the section choices). A causal mask raises the NLL of all
questions from {nll:.3f} to {causal_nll:.3f}.

## Where the data comes from

{source}. Sections and debtags are the labels. Packages' metadata is covered by each package's own free licence.
Splits go by a hash of the source package's name: 92 % training, 3 % validation, 5 % test.

## How it was made

{layers} layers ({linear} gated delta rule, {full} full attention), hidden size {hidden}, {parameters:.2f} M parameters;
matrices in BF16, norms and readout in FP32. Byte-level BPE of {vocabulary} tokens with Qwen's pre-tokenizer, trained on
the training split. Attention mode `prefix_bidir`.

{made}
`tools/train_demo.py` does it; `docs/records/2026-11-29-demo-checkpoint.md` has the commands, times and what failed.
"""


MADE = """\
A word model (token vectors and weights, a layer that reads a word beside those before it, what each word means beside
the state's mean, bilinear units that compare the state with each line) was trained on a GPU in four minutes and then
written into the network's weights: a gated delta rule that averages a line, another that reads neighbours, attention
that averages a state, attention that selects an option by its evidence. Targets of section choices are half the truth,
half what a regression says that did not see the package."""


def model_card(results: Mapping[str, Any], g: Geometry, parameters: int) -> str:
    """The card's text. `results` is what `train` measured, with the baselines beside it."""
    held_out, causal = results["held_out"], results["causal_mask"]
    rows = [
        f"| {title} | {held_out[name]['questions']} | {held_out[name]['accuracy']:.1%} | {held_out[name]['nll']:.3f} "
        f"| {held_out[name]['ece']:.3f} | {causal[name]['accuracy']:.1%} |"
        for name, title in TITLES.items()
        if name in held_out
    ]
    scores = {"this model": held_out["section"]["accuracy"], **results["baselines"]}
    return TEXT.format(
        held_out=held_out["all"]["questions"],
        temperature=results["temperature"],
        rows="\n".join(rows),
        baselines=", ".join(f"{name} {score:.1%}" for name, score in scores.items()),
        uncalibrated=results["uncalibrated"]["ece"],
        changed=results["changed_by_order"]["all"],
        nll=held_out["all"]["nll"],
        causal_nll=causal["all"]["nll"],
        changed_section=results["changed_by_order"]["section"],
        source=SOURCE,
        layers=len(g.layer_types),
        linear=g.linear_layers,
        full=g.full_layers,
        hidden=g.hidden,
        parameters=parameters / 1e6,
        made=MADE,
        vocabulary=g.vocab_size,
    )
