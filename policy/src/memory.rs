//! Memory for weights. A page of 4 KiB that is touched for the first time took 2 µs on the virtual machine of docs/delta.md, in which
//! 9 KB of a model are verified, so large buffers ask for pages of 2 MiB.

#![expect(unsafe_code, reason = "tells the kernel which pages memory should have")]

/// Memory smaller than some huge pages stays as it is.
const LARGE_BYTES: usize = 8 << 20;
const PAGE_BYTES: usize = 4096;

/// `count` zeros, which take no memory until they are written to.
pub(crate) fn zeros<T: Copy + Default>(count: usize) -> Vec<T> {
    let mut zeros = vec![T::default(); count];
    in_huge_pages(&mut zeros);
    zeros
}

/// An empty vector with room for `count`, as far as they will ever be written.
pub(crate) fn room<T: Copy>(count: usize) -> Vec<T> {
    let mut room = Vec::with_capacity(count);
    in_huge_pages(&mut room);
    room
}

/// Asks for huge pages, for all pages that the memory lies in: a mapping that is advised in part becomes two, of which a process
/// may have some tens of thousands. Where there are none to be had, nothing changes.
#[cfg(target_os = "linux")]
fn in_huge_pages<T>(memory: &mut Vec<T>) {
    use nix::sys::mman::{MmapAdvise, madvise};
    let bytes = memory.capacity() * size_of::<T>();
    let first = memory.as_mut_ptr().cast::<u8>();
    let before = first.addr() % PAGE_BYTES;
    let start = std::ptr::NonNull::new(first.wrapping_sub(before).cast());
    if let Some(start) = start.filter(|_| bytes >= LARGE_BYTES) {
        let pages = (before + bytes).next_multiple_of(PAGE_BYTES);
        // SAFETY: the vector's memory lies in each of these pages, so all are this process's own, and the advice changes neither
        // what they hold nor who may use them.
        let _ = unsafe { madvise(start, pages, MmapAdvise::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn in_huge_pages<T>(_: &mut Vec<T>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_zeros_and_room_is_empty() {
        for count in [0, 1, 1000, LARGE_BYTES / 2 + 1] {
            assert!(zeros::<u16>(count) == vec![0; count]);
            let room = room::<u32>(count);
            assert!(room.is_empty() && room.capacity() >= count);
        }
    }
}
