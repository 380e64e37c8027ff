// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace flexkv::eviction {

// Numbers, of which the least is on top. A number whose order changes is moved in O(log n).
template <typename Less>
class Heap {
 public:
  explicit Heap(Less less) : less_(less) {}

  bool empty() const noexcept { return heap_.empty(); }
  std::uint32_t top() const noexcept { return heap_.front(); }
  bool has(std::uint32_t number) const noexcept {
    return number < places_.size() && places_[number] != kNone;
  }

  // The number is not there.
  void push(std::uint32_t number) {
    if (number >= places_.size()) {
      places_.resize(std::size_t{number} + 1, kNone);
    }
    heap_.push_back(number);
    places_[number] = static_cast<std::uint32_t>(heap_.size() - 1);
    rise(heap_.size() - 1);
  }

  void pop() noexcept {
    const std::uint32_t last = heap_.back();
    places_[heap_.front()] = kNone;
    heap_.pop_back();
    if (!heap_.empty()) {
      put(0, last);
      sink(0);
    }
  }

  // The order of the number, which is there, has changed.
  void move(std::uint32_t number) noexcept {
    rise(places_[number]);
    sink(places_[number]);
  }

  void clear() noexcept {
    heap_.clear();
    places_.clear();
  }

 private:
  void put(std::size_t at, std::uint32_t number) noexcept {
    heap_[at] = number;
    places_[number] = static_cast<std::uint32_t>(at);
  }

  void swap(std::size_t one, std::size_t other) noexcept {
    const std::uint32_t number = heap_[one];
    put(one, heap_[other]);
    put(other, number);
  }

  void rise(std::size_t at) noexcept {
    while (at > 0 && less_(heap_[at], heap_[(at - 1) / 2])) {
      swap(at, (at - 1) / 2);
      at = (at - 1) / 2;
    }
  }

  void sink(std::size_t at) noexcept {
    while (true) {
      std::size_t least = at;
      for (std::size_t child = 2 * at + 1; child <= 2 * at + 2 && child < heap_.size(); ++child) {
        if (less_(heap_[child], heap_[least])) {
          least = child;
        }
      }
      if (least == at) {
        return;
      }
      swap(at, least);
      at = least;
    }
  }

  Less less_;
  std::vector<std::uint32_t> heap_;
  std::vector<std::uint32_t> places_;  // by number; kNone of those that are not there
};

}  // namespace flexkv::eviction
