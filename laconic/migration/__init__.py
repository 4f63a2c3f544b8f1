"""Reads a training script and says what to change to move it from torch's hooks and averagers to laconic's.

Scripts are parsed, never run. `check` lists findings: the imports to change (`imports`) and known misuses
(`misuses`), each with its line, the rule behind it and the way out. `rewrite` gives the script with its imports
changed and every other byte as it was; `write` puts that in the file's place in one step.

    for finding in check(read_script("train.py")):
        print(finding.line, finding.why, finding.way_out)
"""

from laconic.migration.checking import check, remaining, rewrite
from laconic.migration.findings import Finding
from laconic.migration.script import Script, ScriptError, read_script, write

__all__ = ["Finding", "Script", "ScriptError", "check", "read_script", "remaining", "rewrite", "write"]
