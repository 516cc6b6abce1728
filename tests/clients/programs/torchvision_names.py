"""Names of torchvision's compiled operators, which `environment.sh` lets it find."""

import torch

_NAMES = torch.library.Library("torchvision", "DEF")
_NAMES.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_NAMES.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
