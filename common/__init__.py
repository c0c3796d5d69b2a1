"""What must be the same for every method: see the file map in README.md."""

import logging

# transformers imports torchao, whose wheel warns on every rank and machine about kernels for other GPUs and Python versions, and about
# the way it registers its own classes. Six lines a rank hide the lines that matter; what is loaded does not change.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
