// SPDX-License-Identifier: Apache-2.0
//
// What the files that implement the C ABI share.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "flexkv/mover.h"
#include "mover.hpp"

struct fkv_mover {
  std::unique_ptr<flexkv::Mover> mover;
};

namespace flexkv {

// Copies what fits of the message to err, with its terminator. err may be nullptr.
void write_message(char* err, std::size_t err_len, std::string_view message) noexcept;

}  // namespace flexkv
