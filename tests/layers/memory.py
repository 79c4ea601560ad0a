"""How large the tensors are that a computation makes or keeps."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def largest_tensor(run):
    """Elements of the largest tensor that any operation under ``run()`` returns, backward included."""
    with _Largest() as mode:
        run()
    return mode.elements


def saved_elements(forward):
    """Elements of the distinct tensors that ``forward()`` keeps for its backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.numel() for tensor in kept.values())
