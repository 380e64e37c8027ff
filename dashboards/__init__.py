# SPDX-License-Identifier: Apache-2.0
"""A Grafana dashboard and Prometheus alerts, made from the definitions of FlexKV's metrics.

`python -m dashboards --write` writes `flexkv.json` and `alerts.yml` beside this file.
"""
