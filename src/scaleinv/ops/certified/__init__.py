"""Certified decoding: attention that reads the keys that matter and proves what the others could have changed."""

from scaleinv.ops.certified.cache import Certificate, CertifiedCache

__all__ = ["Certificate", "CertifiedCache"]
