// SPDX-License-Identifier: Apache-2.0
//
// Device memory for measurements.
#pragma once

#include <cstdint>

#include "driver.hpp"

namespace flexkv::cuda {

// Its address. The device's context exists at least until it is released. Throws InvalidArgument,
// DriverError, std::bad_alloc.
std::uint64_t allocate(const Driver& driver, std::int32_t ordinal, std::uint64_t bytes);

// Frees what allocate returned; anything else is ignored.
void release(std::uint64_t address) noexcept;

}  // namespace flexkv::cuda
