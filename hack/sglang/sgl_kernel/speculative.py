"""See the package: names exist, calls raise."""

from sgl_kernel import __getattr__ as __getattr__
