"""What the checkpoint's runtime makes of files: `prepare.py <folder> <out.npz>`, run by tests as a process.

Pillow and OpenCV decode as it does, and transformers' processors, with its settings, do the rest.
"""

import sys
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

PATCHES = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "return_tensors": "pt",
}  # fmt: skip
LOOK_AT_IMAGES = {**PATCHES, "size": {"shortest_edge": 65536, "longest_edge": 1638400}}
LOOK_AT_VIDEOS = {
    **PATCHES, "size": {"shortest_edge": 4096, "longest_edge": 6422528}, "cap_pixels_per_frame": True,
    "do_sample_frames": False, "return_metadata": True,
}  # fmt: skip
MOST_OF_A_FRAME = 196  # tokens


def image(path):
    """Patch rows and grid."""
    with Image.open(path) as opened:
        found = Qwen2VLImageProcessor()(opened.convert("RGB"), **LOOK_AT_IMAGES)
    return {"rows": found["pixel_values"], "grid": found["image_grid_thw"][0]}


def sample(path):
    """The frames that are read, their numbers, and the rate; `None` frames are those that were lost."""
    reader = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    rate, total = reader.get(cv2.CAP_PROP_FPS), int(reader.get(cv2.CAP_PROP_FRAME_COUNT))
    if not 0.1 <= rate <= 1000:
        rate = 24.0
    if total <= 0:
        total = 0
        while reader.grab():
            total += 1
        reader = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
    count = min(max(int(total / rate * 2), 4), 32, total)
    wanted = np.linspace(0, total - 1, count).round().astype(int).tolist()
    frames, numbers = [], []
    for number in range(total):
        if reader.grab() and number in wanted:
            frames.append(cv2.cvtColor(reader.retrieve()[1], cv2.COLOR_BGR2RGB))
            numbers.append(number)
    if len(frames) % 2:
        frames, numbers = frames + frames[-1:], numbers + numbers[-1:]
    return np.stack(frames), numbers, rate, total


def video(path):
    """Patch rows, grid and the times of the pairs."""
    frames, numbers, rate, total = sample(path)
    metadata = VideoMetadata(total_num_frames=total, fps=rate, frames_indices=numbers)
    found = Qwen3VLVideoProcessor(max_video_tokens=MOST_OF_A_FRAME)(
        frames, video_metadata=[metadata], **LOOK_AT_VIDEOS
    )
    times = [number / rate for number in numbers]
    pairs = [(times[at] + times[at + 1]) / 2 for at in range(0, len(times), 2)]
    return {"rows": found["pixel_values_videos"], "grid": found["video_grid_thw"][0], "seconds": pairs}


def main(folder, out):
    """Prepare `image/*` and `video/*`."""
    found = {}
    for kind, prepare in (("image", image), ("video", video)):
        for path in sorted((folder / kind).iterdir()):
            found |= {f"{path.name}/{what}": np.asarray(value) for what, value in prepare(path).items()}
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
