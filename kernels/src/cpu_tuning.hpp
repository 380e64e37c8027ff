// SPDX-License-Identifier: Apache-2.0
//
// The settings of the CPU mover and their defaults.
#pragma once

#include "cpu_mover.hpp"
#include "flexkv/mover.h"

namespace flexkv {

// Checks the options and fills in what they leave open. Throws InvalidArgument.
CpuTuning tune(const fkv_cpu_options& options);

}  // namespace flexkv
