"""Sparse layers, models and decode kernels of "Sparse is Enough in Scaling Transformers".

Nothing heavy is imported here: take what you need from the submodules, for example

    from sparselib.config import preset
    from sparselib.models import Transformer
"""

__version__ = "0.1.0"
