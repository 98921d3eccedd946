"""Writes the word model into the network: a start from which end-to-end training only has to refine.

A first layer is silent: training makes it read words beside their neighbours. Then four: a gated delta rule that
gives every line's end the mean of its line, its code and whether it stands in the question; an attention that
brings the mean of the state's words to every row, with an MLP that reads each of the state's words in that light;
an attention that averages what they mean, with an MLP that compares it with each line; an attention in which the
prompt's last row selects an option by its evidence.
Parts without a role keep random inputs and start with silent outputs, so the network begins as the word model.
"""

import torch
from demo.batches import RECENT
from demo.network import FullAttention, LinearAttention, Model
from demo.prompts import Tokenizing
from demo.questions import OPTIONS
from demo.words import ALWAYS, GAIN, LARGE, SHARPNESS, SILENT, SMALL, WEIGHED, WIDTH, WordModel
from torch import Tensor

# Residual dimensions.
HALF = WIDTH // 2
WORDS, STATE, MEANING = (slice(i * WIDTH, (i + 1) * WIDTH) for i in range(3))
CODE, HELD = slice(192, 204), slice(204, 216)  # of a code's own token; of the line that a row stands in
END, BLANK, RESET, QUESTION, ASKED, EVIDENCE, YES = range(217, 224)
OUT = slice(224, 236)
WEIGHT = 238  # of a word
STOPS = {"?": 236, ".": 237}  # marks that end a question's text, joined to the newlines after them
NEVER = -16.0  # a sigmoid's or softplus' argument


@torch.no_grad()
def install(model: Model, words: WordModel, tokenizing: Tokenizing) -> None:
    """Set every parameter of the backbone and the readout."""
    lines, beside, state, meaning, answer = model.backbone.layers
    _quiet(model)
    _embed(model.backbone.embed_tokens.weight, words, tokenizing)
    _gather_lines(lines.linear_attn)
    _clear_stops(lines.mlp, model.backbone.embed_tokens.weight, tokenizing)
    _clear_state_lines(lines.mlp)
    beside.load_state_dict(words.neighbours.layer.state_dict())
    beside.linear_attn.in_proj_z.weight[:, ASKED] = 2 * NEVER
    beside.mlp.gate_proj.weight[:, ASKED] = 2 * NEVER
    _average_state(state.self_attn, WORDS, STATE)
    _understand(state.mlp, words)
    _average_state(meaning.self_attn, MEANING, MEANING)
    _compare(meaning.mlp, words)
    _select(answer.self_attn)
    readout = model.readout
    readout.zero_()
    readout[:OPTIONS, OUT] = torch.eye(OPTIONS) * GAIN


def _quiet(model: Model) -> None:
    """Random inputs that do not see ALWAYS, outputs of zero, memories of middling length."""
    for layer in model.backbone.layers:
        for name, p in layer.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.ndim == 2:
                p[:, ALWAYS] = 0.0


def _embed(embedding: Tensor, words: WordModel, tokenizing: Tokenizing) -> None:
    embedding.zero_()
    embedding[:, WORDS], embedding[:, WEIGHT] = words.vectors * words.mute, words.weights[:, 0]
    embedding[:, ALWAYS] = LARGE
    ends = [token for token in range(len(embedding)) if tokenizing.ends_line(token)]
    embedding[ends, END] = 1.0
    embedding[tokenizing.blank_tokens(), BLANK] = 1.0
    for text, flag in STOPS.items():
        joined = tokenizing.token(text + "\n\n")
        embedding[joined, WORDS], embedding[joined, flag] = words.vectors[tokenizing.token(text)], 1.0
    resets = tokenizing.reset_tokens()
    embedding[resets, RESET] = 1.0
    embedding[resets[:OPTIONS], CODE] = torch.eye(OPTIONS)
    embedding[tokenizing.question_token(), QUESTION] = 1.0


def _gather_lines(mixer: LinearAttention) -> None:
    """Heads 0 and 1: a line's recent mean. Head 2: the line's code. Head 3: whether `Question` was read."""
    g = mixer.g
    size, keys = g.linear_key_dim, g.linear_key_heads * g.linear_key_dim
    for p in (
        mixer.in_proj_qkv.weight,
        mixer.in_proj_z.weight,
        mixer.in_proj_b.weight,
        mixer.in_proj_a.weight,
    ):
        p.zero_()
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[:, 0, -1] = 1.0
    qkv, out = mixer.in_proj_qkv.weight, mixer.out_proj.weight
    for head in range(g.linear_value_heads):
        qkv[head * size, ALWAYS] = qkv[keys + head * size, ALWAYS] = 2.0 / LARGE  # one key for all rows
    values = qkv[2 * keys :].unflatten(0, (-1, size))  # [heads, size, hidden]
    for head in (0, 1):
        values[head, :HALF, head * HALF : (head + 1) * HALF] = torch.eye(HALF) * 0.05
        values[head, HALF, ALWAYS] = 1.0 / LARGE
        _write(mixer, head, content=_logit(RECENT), at_blank=-8.0)
        mixer.in_proj_a.weight[head, RESET] = 40.0  # forget the line before
        mixer.in_proj_b.weight[head, RESET] = NEVER
    values[2, :OPTIONS, CODE] = torch.eye(OPTIONS) * 2.0
    values[2, OPTIONS, RESET] = 2.0
    values[3, 0, QUESTION] = 2.0
    for head, flag in ((2, RESET), (3, QUESTION)):
        _write(mixer, head, content=NEVER, at_blank=NEVER)
        mixer.in_proj_b.weight[head, flag] = -2 * NEVER
    mixer.A_log.zero_()
    mixer.dt_bias.fill_(NEVER)
    mixer.norm.weight.fill_(1.0)
    gates = mixer.in_proj_z.weight.unflatten(0, (-1, size))
    gates[:3, :, ALWAYS], gates[:3, :, END] = -10.0 / LARGE, 14.0
    gates[3, :, ALWAYS] = 4.0 / LARGE
    gate = 4.0 / (1 + 2.718281828**-4)  # silu(4)
    constant = 0.7311 / 8  # silu(1) over the root of the head's size: what a line's mean is normed by
    for head in (0, 1):
        rows = torch.eye(HALF) / (0.025 / constant * gate)
        out[head * HALF : (head + 1) * HALF, head * size : head * size + HALF] = rows
    held = (size / 2) ** 0.5  # two equal values of a head, normed
    out[HELD, 2 * size : 2 * size + OPTIONS] = torch.eye(OPTIONS) / (held * gate)
    out[ASKED, 3 * size] = 1.0 / (size**0.5 * gate)


def _clear_stops(mlp: torch.nn.Module, embedding: Tensor, tokenizing: Tokenizing) -> None:
    """A stop counts as a word of its line, whose mean its own row must hold alone, in a question."""
    for unit, (text, flag) in enumerate(STOPS.items()):
        mlp.gate_proj.weight[unit].zero_()
        mlp.up_proj.weight[unit].zero_()
        mlp.gate_proj.weight[unit, flag] = mlp.gate_proj.weight[unit, ASKED] = 2 * LARGE  # both, or nothing
        mlp.gate_proj.weight[unit, ALWAYS] = -3.0
        mlp.up_proj.weight[unit, ALWAYS] = 1.0 / LARGE
        mlp.down_proj.weight[WORDS, unit] = -embedding[tokenizing.token(text + "\n\n"), WORDS] / LARGE


def _clear_state_lines(mlp: torch.nn.Module) -> None:
    """Line ends of the state, which no question asks about, give back what they gathered."""
    units = slice(len(STOPS), len(STOPS) + WIDTH)
    for p in (mlp.gate_proj.weight, mlp.up_proj.weight):
        p[units].zero_()
    mlp.gate_proj.weight[units, END], mlp.gate_proj.weight[units, ASKED] = LARGE, -LARGE
    mlp.up_proj.weight[units, WORDS] = torch.eye(WIDTH)
    mlp.down_proj.weight[WORDS, units] = -torch.eye(WIDTH) / LARGE


def _write(mixer: LinearAttention, head: int, *, content: float, at_blank: float) -> None:
    mixer.in_proj_b.weight[head, ALWAYS] = content / LARGE
    mixer.in_proj_b.weight[head, BLANK] = at_blank - content


def _logit(share: float) -> float:
    return float(torch.logit(torch.tensor(share)))


def _average_state(mixer: FullAttention, read: slice, written: slice) -> None:
    """The first head of each group attends evenly to the rows before `Question` and brings half of what they hold."""
    query, keys, values, out = _views(mixer)
    for group in range(2):
        query[group, 0].zero_()
        query[group, 0, 32, ALWAYS], query[group, 0, 34, ALWAYS] = -4.0 / LARGE, 1.0 / LARGE
        keys[group].zero_()
        keys[group, 32, ASKED], keys[group, 33, ALWAYS], keys[group, 34, WEIGHT] = 8.0, 1.0 / LARGE, 1.0
        values[group, :HALF].zero_()
        values[group, :HALF, read][:, group * HALF : (group + 1) * HALF] = torch.eye(HALF)
        rows = out[written][group * HALF : (group + 1) * HALF]
        rows[:, 2 * group, :HALF] = (
            torch.eye(HALF) * 8.0
        )  # the output gate halves, the word model takes four times
    mixer.q_norm.weight.fill_(WEIGHED * 17**0.5 / 8 - 1)


def _understand(mlp: torch.nn.Module, words: WordModel) -> None:
    """Each of the state's words beside the state's mean; line ends keep their place free for what they will read."""
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    gate.zero_()
    gate[:, WORDS], gate[:, STATE] = words.context.weight.split(WIDTH, dim=-1)
    gate[:, ALWAYS] = words.context.bias / LARGE
    up.zero_()
    up[:, ALWAYS], up[:, END] = 1.0 / LARGE, -1.0
    down.zero_()
    down[MEANING] = words.feature.weight * SMALL


def _compare(mlp: torch.nn.Module, words: WordModel) -> None:
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    gate.zero_()
    gate[:, WORDS], gate[:, ALWAYS] = words.line.weight, words.line.bias / LARGE
    up.zero_()
    up[:, STATE], up[:, MEANING] = words.state.weight.split(WIDTH, dim=-1)
    up[:, MEANING] /= SMALL
    up[:, ALWAYS] = words.state.bias / LARGE
    down.zero_()
    down[EVIDENCE], down[YES] = 0.5 * words.option, 0.5 * words.ask


def _select(mixer: FullAttention) -> None:
    """Head 0: option lines by evidence, bringing their codes. Head 2: all other line ends evenly, for yes or no."""
    query, keys, values, out = _views(mixer)
    query[:, 0].zero_()
    keys.zero_()
    values[:, :OPTIONS].zero_()
    sharp = 2.0  # the norms' weights, 1 + w, of the queries
    mixer.q_norm.weight.fill_(sharp - 1)
    query[0, 0, 32, ALWAYS], query[0, 0, 34, ALWAYS] = 1.0 / LARGE, -1.0 / LARGE
    scale = 8 / 2**0.5 * sharp  # of the evidence's logit for a key of one
    keys[0, 32, EVIDENCE] = SHARPNESS / scale / 0.5
    keys[0, 33, ALWAYS] = 1.0 / LARGE
    keys[0, 34, ALWAYS], keys[0, 34, HELD], keys[0, 34, ASKED] = 6.0 / LARGE, -3.0, -3.0
    values[0, :OPTIONS, HELD] = torch.eye(OPTIONS)
    out[OUT][:, 0, :OPTIONS] = torch.eye(OPTIONS) * 2.0
    query[1, 0, 32, ALWAYS] = 1.0 / LARGE
    keys[1, 32, END] = keys[1, 32, ASKED] = 8.0
    keys[1, 32, HELD], keys[1, 32, ALWAYS] = -8.0, -12.0 / LARGE
    keys[1, 33, ALWAYS] = 1.0 / LARGE
    values[1, 0, YES] = 1.0
    push = 2.0 * SILENT / 0.5 / GAIN / 2  # undo the gate, the mean, the stored half and the readout
    out[OUT][0, 2, 0], out[OUT][1, 2, 0] = -push, push


def _views(mixer: FullAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [groups, heads of a group, D, hidden], keys and values [groups, D, hidden], out [hidden, heads, D].

    Output gates are set to a half.
    """
    g = mixer.g
    query = mixer.q_proj.weight.view(g.kv_heads, g.heads // g.kv_heads, 2, g.head_dim, g.hidden)
    query[:, :, 1].zero_()
    keys = mixer.k_proj.weight.view(g.kv_heads, g.head_dim, g.hidden)
    values = mixer.v_proj.weight.view(g.kv_heads, g.head_dim, g.hidden)
    return query[:, :, 0], keys, values, mixer.o_proj.weight.view(g.hidden, g.heads, g.head_dim)
