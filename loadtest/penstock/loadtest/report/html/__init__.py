"""Reports as one self-contained page: plots are SVG made here, nothing is fetched, nothing needs a script."""

from penstock.loadtest.report.html.page import page

__all__ = ["page"]
