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

LEAD = """\
A small decision model in the Decision 3.0 package format, trained from scratch on descriptions of
Debian packages. It lets you try, test and show d3serve on a CPU with meaningful answers. It is no
general model: it knows software packages and the questions below, and nothing else.
"""

TEXT = """\
---
license: apache-2.0
language: en
---
# demo-d3

{lead}
## What it knows

Given a package's description (text, or a JSON object of its fields), it answers:

- which section of the archive the package belongs to
- yes/no questions (a game? a library? for developers? needs a network? …)
- which language, role, interface, summary, name or dependency is its own
- scores of size and use

Choices have 2 to 12 options.

## What it does not know

Of texts it knows only those about software packages. It reads a state as a bag of words, each with
those before it. Negation and long-range structure are beyond it, as is much matching of rare names
(see the table). Scores of size and use are little better than guessing, as descriptions hardly
reveal them. It was not trained on questions worded far from the training wordings, more than twelve
options, states beyond about 600 tokens, or languages other than English. Yes/no questions from
debtags are as incomplete as the tags.

## How good it is

{held_out} held-out questions. Held-out means another *source* package, so a library and its headers
are never on both sides. Temperature {temperature} was fitted on the validation split. ECE: 15 bins
of equal width.

| questions | number | accuracy | NLL | ECE | accuracy with a causal mask |
| --- | --- | --- | --- | --- | --- |
{rows}

Section among twelve, same states, same options: {baselines}.

Before calibration, the ECE over all questions was {uncalibrated:.3f}. Reversing the order of the
options changes {changed:.1%} of the choices ({changed_section:.1%} of the section choices). A
causal mask raises the NLL of all questions from {nll:.3f} to {causal_nll:.3f}.

## Where the data comes from

{source}. Sections and debtags are the labels. Metadata is covered by each package's own free
licence. Splits use a hash of the source package's name: 92% training, 3% validation, 5% test.

## How it was made

It has {layers} layers ({linear} gated delta rule, {full} full attention), hidden size {hidden} and
{parameters:.2f} M parameters. Matrices are BF16, norms and readout FP32. The tokenizer is a
byte-level BPE of {vocabulary} tokens with Qwen's pre-tokenizer, trained on the training split.
Attention mode `prefix_bidir`.

{made}

`tools/train_demo.py` makes it. `docs/records/2026-11-29-demo-checkpoint.md` has the commands, times
and what failed.
"""


MADE = """\
First a word model was trained on a GPU in four minutes. It has token vectors and weights, a layer
that reads each word with those before it, the meaning of each word relative to the state's mean,
and bilinear units that compare the state with each line. Then it was written into the network's
weights: one gated delta rule averages a line, another reads neighbours, one attention layer
averages a state, another selects an option by its evidence. Targets for section choices are half
the truth, half a prediction by a regression that had not seen the package."""


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
        lead=LEAD,
        held_out=held_out["all"]["questions"],
        temperature=results["temperature"],
        rows="\n".join(rows),
        baselines="; ".join(f"{name} {score:.1%}" for name, score in scores.items()),
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
