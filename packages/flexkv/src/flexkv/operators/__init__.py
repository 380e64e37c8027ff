# SPDX-License-Identifier: Apache-2.0
"""What people may ask of a process that has a cache: HTTP on a socket of its runtime directory, and
on a port for those who know a token.

`verbs` is the table of calls with their questions and answers, `door` answers, `ask_door` asks.
`engine_door` opens the doors of an engine; `flexkv.service.endpoints` those of a service.
"""
