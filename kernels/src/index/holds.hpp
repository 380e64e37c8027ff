// SPDX-License-Identifier: Apache-2.0
//
// The slots that readers of an index in shared memory hold, each in a counter of its own.
//
// A reader looks at the version of a slot, counts its hold, has a fence, and looks again. The owner of
// the index changes the version before a block leaves, and has a fence before it looks at the holds of
// a slot that it is about to give away. So a reader that holds a slot has the block that it looked for
// until it lets go, or notices at the second look.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../python/buffer.hpp"
#include "memory.hpp"

namespace flexkv::index {

using Hold = std::uint16_t;

class Holds {
 public:
  // The memory has a counter for each slot, which one reader writes. Returns the number of the reader.
  std::size_t add(std::unique_ptr<python::Buffer> memory) {
    areas_.emplace_back(next_, std::move(memory));
    return next_++;
  }

  // Returns false if there is no such reader.
  bool remove(std::size_t number) noexcept {
    return std::erase_if(areas_, [&](const Area& area) { return area.first == number; }) > 0;
  }

  bool empty() const noexcept { return areas_.empty(); }

  // Whether any reader holds the slot.
  bool has(Slot slot) const noexcept {
    for (const Area& area : areas_) {
      const auto* const counters = reinterpret_cast<const Hold*>(area.second->start());
      if (load_word(counters[slot]) != 0) {
        return true;
      }
    }
    return false;
  }

 private:
  using Area = std::pair<std::size_t, std::unique_ptr<python::Buffer>>;

  std::vector<Area> areas_;
  std::size_t next_ = 0;
};

}  // namespace flexkv::index
