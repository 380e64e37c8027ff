# SPDX-License-Identifier: Apache-2.0
"""How operators ask a process that has a cache: HTTP on a socket of its runtime directory.

`http_door` answers, `ask_door` asks, `prompts` has questions and answers, and `find_blocks` counts
what tiers have of a prompt.
"""
