"""The report of a comparison: a page that opens anywhere, and its figures as an image.

Figures are drawn by matplotlib and the page is filled in by Jinja, both imported only when a report is asked for.
"""

from laconic.compare.report.page import check_drawable, write_page, write_png
from laconic.compare.report.sentence import headline

__all__ = ["check_drawable", "headline", "write_page", "write_png"]
