"""Names of compiled operators of torchvision, which `environment.sh` makes importable."""

import torch

_NAMES = torch.library.Library("torchvision", "DEF")
_NAMES.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_NAMES.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
