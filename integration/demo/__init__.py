# SPDX-License-Identifier: Apache-2.0
"""The demo: users take turns at a real engine, first without FlexKV, then with it, and return after
the engine was killed and started again.

Each user talks about a long text. The engine's KV cache has room for fewer conversations than there
are, as a GPU has, so when a user comes back it must compute the conversation again, while FlexKV
still holds it in host memory. The engine's own prefix cache is on in all runs.
"""
