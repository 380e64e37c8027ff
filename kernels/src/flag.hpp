// SPDX-License-Identifier: Apache-2.0
//
// Completion flags: words that other processes may watch. With the compilers' builtins because
// std::atomic_ref is missing from several libc++.
#pragma once

#include <cstdint>

#include "mover.hpp"

namespace flexkv {

inline void raise_flag(std::uint32_t* flag, Status status) noexcept {
  if (flag != nullptr) {
    __atomic_store_n(flag, static_cast<std::uint32_t>(status), __ATOMIC_RELEASE);
  }
}

// FAILED, unless a device that writes the flag too has said DONE: then the word is the caller's again.
inline void raise_failed_flag(std::uint32_t* flag) noexcept {
  if (flag != nullptr) {
    auto expected = static_cast<std::uint32_t>(Status::pending);
    __atomic_compare_exchange_n(flag, &expected, static_cast<std::uint32_t>(Status::failed), false,
                                __ATOMIC_RELEASE, __ATOMIC_RELAXED);
  }
}

}  // namespace flexkv
