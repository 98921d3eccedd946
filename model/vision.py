"""The vision tower: frames to the features that stand in for a state's pad tokens."""

from torch import Tensor

from d3serve.model.media import CHANNELS, MERGE, PATCH, TEMPORAL

HALF = 127.5  # pixels of 0 to 255 become -1 to 1


def patch_rows(frames: Tensor) -> Tensor:
    """Cut frames [T, 3, height, width] uint8 into the tower's rows, [patches, 3·2·16·16] FP32.

    One frame stands for both of a patch. Rows stand in blocks of 2 × 2 patches, which become one token each.
    """
    if len(frames) == 1:
        frames = frames.expand(TEMPORAL, -1, -1, -1)
    count, _, height, width = frames.shape
    blocks = (height // PATCH // MERGE, MERGE, PATCH, width // PATCH // MERGE, MERGE, PATCH)
    cut = frames.view(count // TEMPORAL, TEMPORAL, CHANNELS, *blocks).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    rows = cut.reshape(-1, CHANNELS * TEMPORAL * PATCH**2).float()
    return (rows - HALF) / HALF
