"""How good answers are: labelled cases and the answers to them, become figures, a comparison and a page. Pure.

    cases    labelled cases, read strictly from JSON Lines or CSV
    judged   one labelled question with its answer; what a file of results says of the cases
    figures  accuracy, log loss, Brier score, calibration, confusion, scores
    yes_no   where to put the threshold of a yes/no question
    paired   which of two sets of answers to the same cases is better, if that can be told
    report   all of it, as JSON
    plots    reliability and thresholds, as SVG
    page     one self-contained HTML page

Only `cases` and `judged` do without the extra `d3serve[eval]`.
"""
