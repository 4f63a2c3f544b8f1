"""The report of a comparison: one HTML file.

It uses matplotlib and Jinja, which are imported only when a report is written.
"""

from laconic.tools.compare.report.page import check_drawable, write_page
from laconic.tools.compare.report.sentence import headline

__all__ = ["check_drawable", "headline", "write_page"]
