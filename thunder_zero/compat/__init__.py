"""What exists because of a version of Thunder or of torch; nobody else patches them.

Each file opens with one line: "needed while: ..."; or, if it has several workarounds, each section of it does.
``tests/one/test_needs.py`` has a row for each, which fails on the versions that the need is known for
(``imports.KNOWN``) once it is gone: then the file or section goes, too. The table of these lines is in
docs/compatibility.md.
"""
