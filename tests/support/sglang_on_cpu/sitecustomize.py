"""Definitions with which SGLang 0.5.23 starts on the CPU build of torch.

Python imports this file at its start if the folder is on PYTHONPATH.

The wheel of torchvision for CUDA registers operators that the CPU build of torch does not have. Importing
torchvision fails if they are not defined.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            torch = import_module("torch")

            torch.library.define("torchvision::nms", _BOXES)
            torch.library.define("torchvision::qnms", _BOXES)


sys.meta_path.insert(0, _BeforeTorchvision())
