"""Makes torchvision importable beside a CPU build of torch. Set-up puts this into the rollout environment's site-packages, with a .pth file.

transformers' Qwen3.5 classes import torchvision, of which text needs nothing. Its compiled operators are built for the other torch and do
not load, and then the import fails where the Python side describes operators that do not exist. So they are declared first, without code.
"""

import importlib.abc
import importlib.metadata
import importlib.util
import sys

OPERATORS = (
    "deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "qnms", "qroi_align", "roi_align", "roi_pool", "_deform_conv2d_backward",
    "_ps_roi_align_backward", "_ps_roi_pool_backward", "_roi_align_backward", "_roi_pool_backward",
)  # fmt: skip


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the operators at the first import of torchvision, then steps aside. Before that nothing is imported, torch neither."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            self.library.define(operator + "(Tensor x) -> Tensor")
        sys.modules[__name__].declared = self.library  # they go when the library is freed
        return importlib.util.find_spec(name)


if "+cpu" not in importlib.metadata.version("torchvision"):  # that build fits a CPU torch and brings its operators
    sys.meta_path.insert(0, DeclareOperators())
