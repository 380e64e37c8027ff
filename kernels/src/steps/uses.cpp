// SPDX-License-Identifier: Apache-2.0
#include "uses.hpp"

#include <algorithm>

namespace flexkv::steps {

void Uses::release(const Table& table) {
  for (const std::uint32_t block : table) {
    --uses_[block].holders;
    at_least(block, step_ - 1);
  }
}

std::int64_t Uses::last_use(std::uint32_t block) const noexcept {
  if (block >= uses_.size()) {
    return 0;
  }
  const Use& use = uses_[block];
  return use.holders != 0 ? kEverything : use.last;
}

void Uses::reach(std::uint32_t block) {
  if (block >= uses_.size()) {
    // By more than one, so that an engine's first blocks do not copy the table again and again.
    uses_.resize(std::max<std::size_t>(block + 1, 2 * uses_.size()));
  }
}

void Uses::at_least(std::uint32_t block, std::int64_t step) {
  reach(block);
  uses_[block].last = std::max(uses_[block].last, step);
}

}  // namespace flexkv::steps
