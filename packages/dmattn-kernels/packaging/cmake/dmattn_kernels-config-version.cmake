# Which requests of find_package this release satisfies. Before 1.0 a new minor version may change
# anything, so that 0.1.3 satisfies 0.1 and 0.1.2, but not 0.2.
include("${CMAKE_CURRENT_LIST_DIR}/version.cmake") # sets PACKAGE_VERSION

set(PACKAGE_VERSION_COMPATIBLE FALSE)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" own_series "${PACKAGE_VERSION}")

if(PACKAGE_FIND_VERSION_RANGE)
  # As write_basic_package_version_file: a range counts as given.
  if(PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION_MIN
     AND (PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX
          OR (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE" AND PACKAGE_VERSION VERSION_EQUAL
                                                                    PACKAGE_FIND_VERSION_MAX)))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
elseif("${PACKAGE_FIND_VERSION_MAJOR}.${PACKAGE_FIND_VERSION_MINOR}" STREQUAL own_series
       AND PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
unset(own_series)
