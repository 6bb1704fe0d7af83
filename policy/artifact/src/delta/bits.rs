//! Bit streams, lowest bit of each byte first, and codes for non-negative integers.
//!
//! - *Bits*: a fixed number of bits, lowest first.
//! - *Count*: 5 bits L, then L − 1 bits b. The number is 0 if L is 0, else 2^(L−1) + b.
//! - *Golomb* (Golomb 1966): a parameter g of 6 bits stands for a divisor m. First v/m in unary, as
//!   ones and a zero. Let b = ⌊log₂ m⌋ and u = 2^(b+1) − m. A remainder r < u takes b bits.
//!   Otherwise r + u without its lowest bit takes b bits, and then comes that bit. A quotient of 24
//!   or more is written as 24 ones, 7 bits L, and the number in L bits.

use super::{Error, malformed};

/// Quotients from here on are escaped, so no number takes more than 95 bits.
const QUOTIENT_MAX: u64 = 24;
/// Most bits that are written or read at a time.
const AT_ONCE: u32 = 56;

/// A divisor for geometrically distributed numbers: 1 to 7, then four per doubling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Golomb {
    pub parameter: u8,
    divisor: u32,
    /// ⌊log₂ divisor⌋
    bits: u32,
    /// Remainders below this take one bit less.
    short: u32,
}

impl Golomb {
    pub const PARAMETER_BITS: u32 = 6;

    /// `parameter` has six bits.
    pub fn new(parameter: u8) -> Self {
        let divisor = match u32::from(parameter) {
            g @ 0..3 => g + 1,
            g => (4 + (g - 3) % 4) << ((g - 3) / 4),
        };
        let bits = divisor.ilog2();
        Golomb {
            parameter,
            divisor,
            bits,
            short: (2 << bits) - divisor,
        }
    }

    /// The divisor nearest to ln 2 times the mean of `count` numbers with this `sum`, the best one
    /// for geometric numbers. Integer arithmetic, so every machine chooses the same.
    pub fn fit(sum: u64, count: u64) -> Self {
        // ln 2 · (mean + ½): the half corrects for rounding to integers
        // In u128, because the distances of 8-byte weights go up to u64::MAX.
        let (sum, count) = (u128::from(sum), u128::from(count));
        let wanted = (2 * sum + count) * 355 / (count.max(1) * 1024);
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
        let (mut low, mut high) = (0u8, 63u8);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if u64::from(Self::new(middle).divisor) <= wanted {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        // the next one may be nearer
        let (below, above) = (Self::new(low), Self::new((low + 1).min(63)));
        let nearer = wanted.saturating_sub(below.divisor.into()) > u64::from(above.divisor).saturating_sub(wanted);
        if nearer { above } else { below }
    }
}

#[derive(Debug, Default)]
pub(super) struct Writer {
    /// Longer than `written`, so that eight bytes can be stored at a time.
    out: Vec<u8>,
    written: usize,
    held: u64,
    filled: u32,
}

impl Writer {
    /// Writes `bits` (at most 56) bits of `value`, whose other bits are zero.
    #[inline]
    pub fn bits(&mut self, value: u64, bits: u32) {
        self.held |= value << self.filled;
        self.filled += bits;
        let Some(eight) = self.out.get_mut(self.written..self.written + 8) else {
            self.grow();
            return;
        };
        eight.copy_from_slice(&self.held.to_le_bytes());
        self.flush();
    }

    #[inline]
    fn flush(&mut self) {
        let full_bytes = self.filled / 8;
        self.written += full_bytes as usize;
        self.held = self.held.checked_shr(full_bytes * 8).unwrap_or(0);
        self.filled %= 8;
    }

    #[cold]
    fn grow(&mut self) {
        self.out.resize(self.written * 2 + 1024, 0);
        self.out[self.written..self.written + 8].copy_from_slice(&self.held.to_le_bytes());
        self.flush();
    }

    fn long(&mut self, value: u64, bits: u32) {
        let low = bits.min(32);
        self.bits(value & ((1 << low) - 1), low);
        self.bits(value >> 32, bits - low);
    }

    pub fn count(&mut self, value: u32) {
        let length = 32 - value.leading_zeros();
        self.bits(length.into(), 5);
        if length > 1 {
            self.bits((value - (1 << (length - 1))).into(), length - 1);
        }
    }

    #[inline]
    pub fn golomb(&mut self, code: Golomb, value: u64) {
        // nearly all numbers are small, and 32-bit division is twice as fast
        let (quotient, rest) = match u32::try_from(value) {
            Ok(value) => (u64::from(value / code.divisor), value % code.divisor),
            Err(_) => (
                value / u64::from(code.divisor),
                (value % u64::from(code.divisor)) as u32,
            ),
        };
        if quotient >= QUOTIENT_MAX {
            let length = 64 - value.leading_zeros();
            self.bits((1 << QUOTIENT_MAX) - 1, QUOTIENT_MAX as u32);
            self.bits(length.into(), 7);
            self.long(value, length);
            return;
        }
        let quotient = quotient as u32;
        let ones = (1u64 << quotient) - 1;
        let (rest, bits) = if rest < code.short {
            (u64::from(rest), code.bits)
        } else {
            let long = rest + code.short;
            (u64::from(long >> 1 | (long & 1) << code.bits), code.bits + 1)
        };
        self.bits(ones | rest << (quotient + 1), quotient + 1 + bits);
    }

    /// The bytes, padded with zero bits.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.truncate(self.written);
        if self.filled > 0 {
            self.out.push(self.held as u8);
        }
        self.out
    }
}

#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    /// In bits. Reads beyond the end return zeros; [`finish`](Self::finish) then returns an error.
    position: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, position: 0 }
    }

    pub fn bits_left(&self) -> usize {
        (self.bytes.len() * 8).saturating_sub(self.position)
    }

    /// The next 57 bits or more.
    #[inline]
    fn peek(&self) -> u64 {
        let start = self.position / 8;
        let word = match self.bytes.get(start..start + 8).and_then(|eight| eight.first_chunk()) {
            Some(&eight) => u64::from_le_bytes(eight),
            None => {
                let rest = self.bytes.get(start..).unwrap_or_default();
                let mut eight = [0; 8];
                eight[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(eight)
            }
        };
        word >> (self.position % 8)
    }

    /// Reads at most 56 bits.
    #[inline]
    pub fn bits(&mut self, bits: u32) -> u64 {
        let value = self.peek() & ((1 << bits) - 1);
        self.position += bits as usize;
        value
    }

    pub fn count(&mut self) -> u32 {
        match self.bits(5) as u32 {
            0 => 0,
            length => 1 << (length - 1) | self.bits(length - 1) as u32,
        }
    }

    #[inline]
    pub fn golomb(&mut self, code: Golomb) -> Result<u64, Error> {
        let next = self.peek();
        let quotient = (!next).trailing_zeros();
        if u64::from(quotient) >= QUOTIENT_MAX {
            return self.escaped();
        }
        let rest = next >> (quotient + 1);
        let head = (rest & ((1 << code.bits) - 1)) as u32;
        let long = (head << 1 | (rest >> code.bits & 1) as u32).wrapping_sub(code.short);
        let (rest, bits) = if head < code.short {
            (head, code.bits)
        } else {
            (long, code.bits + 1)
        };
        self.position += (quotient + 1 + bits) as usize;
        Ok(u64::from(quotient * code.divisor + rest))
    }

    #[cold]
    fn escaped(&mut self) -> Result<u64, Error> {
        self.bits(QUOTIENT_MAX as u32);
        let length = self.bits(7) as u32;
        if length > 64 {
            return Err(malformed("a number has more than 64 bits"));
        }
        let low = length.min(32);
        Ok(self.bits(low) | self.bits(length - low) << low)
    }

    /// Returns an error on reads beyond the end, unread bytes, or padding that is not zero.
    pub fn finish(self) -> Result<(), Error> {
        if self.position.div_ceil(8) != self.bytes.len() {
            return Err(malformed("a stream of bits is too short or too long"));
        }
        if !self.position.is_multiple_of(8) && self.peek() != 0 {
            return Err(malformed("there are bits after the last one"));
        }
        Ok(())
    }
}

const _: () = assert!(24 + 18 < AT_ONCE, "a Golomb code is written and read at a time");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn divisors_are_those_of_the_documented_table() {
        let first: Vec<u32> = (0..16).map(|g| Golomb::new(g).divisor).collect();
        assert_eq!(first, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]);
        assert_eq!(Golomb::new(63).divisor, 4 << 15);
    }

    #[test]
    fn the_divisor_that_fits_is_the_largest_share_of_the_mean() {
        assert_eq!(Golomb::fit(0, 10).divisor, 1);
        assert_eq!(Golomb::fit(1000, 10).divisor, 64);
        assert_eq!(Golomb::fit(u64::MAX / 1024, 1).parameter, 63);
        assert_eq!(Golomb::fit(0, 0).divisor, 1);
    }

    #[test]
    fn a_stream_that_is_too_short_or_too_long_is_refused() {
        let mut writer = Writer::default();
        writer.bits(5, 3);
        let bytes = writer.finish();
        assert_eq!(bytes, [5]);
        let mut reader = Reader::new(&bytes);
        reader.bits(3);
        assert!(reader.finish().is_ok());
        for (bytes, bits) in [(&[5u8, 0][..], 3), (&[5], 9), (&[13], 3), (&[], 1)] {
            let mut reader = Reader::new(bytes);
            reader.bits(bits);
            assert!(reader.finish().is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn the_parameter_fits_the_largest_sums() {
        // of one distance of 2^63 and one of 2^40: twice the first is 2^64
        let (largest, large) = (Golomb::fit(1 << 63, 1), Golomb::fit(1 << 40, 1));
        assert_eq!(largest.parameter, 63);
        assert!(largest.divisor >= large.divisor);
        assert_eq!(Golomb::fit(u64::MAX, 2).parameter, 63);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            numbers in prop::collection::vec((0u8..64, prop_oneof![0u64..300, any::<u64>(), Just(u64::MAX)]), 0..100),
            counts in prop::collection::vec(0u32..1 << 21, 0..20),
        ) {
            let mut writer = Writer::default();
            for &(parameter, value) in &numbers {
                writer.golomb(Golomb::new(parameter), value);
            }
            for &count in &counts {
                writer.count(count);
            }
            let bytes = writer.finish();
            let mut reader = Reader::new(&bytes);
            for &(parameter, value) in &numbers {
                prop_assert_eq!(reader.golomb(Golomb::new(parameter)).unwrap(), value);
            }
            for &count in &counts {
                prop_assert_eq!(reader.count(), count);
            }
            prop_assert!(reader.finish().is_ok());
        }
    }
}
