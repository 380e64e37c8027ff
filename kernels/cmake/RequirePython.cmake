# SPDX-License-Identifier: Apache-2.0
#
# Finds Python's headers, which index and eviction policy are compiled with, or says how to get them.
find_package(Python3 3.11 COMPONENTS Interpreter Development.Module)
if(NOT Python3_FOUND)
  message(FATAL_ERROR
    "The header Python.h of Python 3.11 or newer is not found. FlexKV's index of blocks needs it.\n"
    "On Debian and Ubuntu: apt-get install python3-dev")
endif()
