"""What the two processors call: on bytes, `resize` is torch's own."""

import numpy as np
import torch

from torchvision.transforms import InterpolationMode


def pil_to_tensor(image):
    return torch.as_tensor(np.array(image, copy=True)).permute(2, 0, 1)


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    assert image.dtype == torch.uint8
    if list(image.shape[-2:]) == list(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    out = torch.nn.functional.interpolate(
        flat, size=list(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return out.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std):
    mean, std = (torch.as_tensor(each).view(-1, 1, 1) for each in (mean, std))
    return image.sub(mean).div_(std)


def grayscale_to_rgb(image):
    assert image.shape[-3] == 3
    return image
