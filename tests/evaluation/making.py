"""Judged answers and files of cases, for the tests of this room."""

import json

from d3serve.evaluation.judged import Judged

YES_NO = ("no", "yes")


def noul(yes, truth, case="c", question="q"):
    return Judged(case, case, question, "noul", YES_NO, (1 - yes, yes), int(truth))


def choice(probabilities, truth, case="c", question="q", options=("a", "b", "c"), kind="choice"):
    return Judged(case, case, question, kind, options, tuple(probabilities), truth)


def nouls(said, truths, question="q"):
    return [noul(p, t, f"c{i}", question) for i, (p, t) in enumerate(zip(said, truths, strict=True))]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
