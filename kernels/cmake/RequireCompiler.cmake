# SPDX-License-Identifier: Apache-2.0
#
# Finds a C++20 compiler, or stops with one message that says what was looked for. CMake's own search
# would print a page of text that never says how to install a compiler.

set(FKV_COMPILER_HELP
  "flexkv-kernels needs a C++20 compiler: GCC >= 11 or Clang >= 14. \
Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; \
macOS: xcode-select --install) or name one in the environment variable CXX.")

# Sets `result` to the compiler that $CXX or the PATH names, or to NOTFOUND.
function(fkv_find_compiler result)
  if(CMAKE_CXX_COMPILER)
    set(candidates "${CMAKE_CXX_COMPILER}")
  elseif(NOT "$ENV{CXX}" STREQUAL "")
    separate_arguments(words UNIX_COMMAND "$ENV{CXX}")  # CXX may carry flags
    list(GET words 0 candidates)
  else()
    set(candidates c++ g++ clang++)
  endif()
  find_program(FKV_CXX NAMES ${candidates} NO_CACHE)
  set(${result} "${FKV_CXX}" PARENT_SCOPE)
endfunction()

fkv_find_compiler(FKV_FOUND_CXX)
if(NOT FKV_FOUND_CXX)
  if(CMAKE_CXX_COMPILER)
    set(FKV_LOOKED_FOR "CMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}")
  elseif(NOT "$ENV{CXX}" STREQUAL "")
    set(FKV_LOOKED_FOR "CXX=$ENV{CXX}")
  else()
    set(FKV_LOOKED_FOR "c++, g++ and clang++ on the PATH (CXX is not set)")
  endif()
  message(FATAL_ERROR "No C++ compiler found. Looked for: ${FKV_LOOKED_FOR}. ${FKV_COMPILER_HELP}")
endif()

if(NOT CMAKE_CXX_COMPILER AND "$ENV{CXX}" STREQUAL "")
  set(CMAKE_CXX_COMPILER "${FKV_FOUND_CXX}")
endif()
enable_language(CXX)

if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11) OR
   (CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14) OR
   NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang|AppleClang)$")
  message(FATAL_ERROR
    "The C++ compiler ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} \
${CMAKE_CXX_COMPILER_VERSION}. ${FKV_COMPILER_HELP}")
endif()
