//! As much of HTTP/2 (RFC 9113) as an attacker needs, so that it may stop anywhere.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// Of SETTINGS and PING.
const ACK: u8 = 1;
/// Of HEADERS and DATA.
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
/// Bytes of answers after which the connection's window is opened again.
const WINDOW_BYTES: u32 = 16 << 10;

pub fn frame_head(length: usize, kind: u8, flags: u8, stream: u32) -> [u8; 9] {
    let [_, a, b, c] = u32::try_from(length).unwrap().to_be_bytes();
    let [d, e, f, g] = stream.to_be_bytes();
    [a, b, c, kind, flags, d, e, f, g]
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&frame_head(payload.len(), kind, flags, stream)[..], payload].concat()
}

/// The fields of a request, uncompressed (RFC 7541).
pub fn fields(method: Method, path: &str, key: Option<&str>) -> Vec<u8> {
    let literal = |name: &[u8], value: &str| {
        let length = u8::try_from(value.len()).unwrap();
        assert!(length < 127);
        [name, &[length], value.as_bytes()].concat()
    };
    let method = match method {
        Method::Get => 0x82,
        Method::Post => 0x83,
    };
    let mut fields = vec![method, 0x86]; // http
    fields.extend(literal(&[0x04], path));
    fields.extend(literal(&[0x01], "localhost"));
    fields.extend(literal(&[0x0f, 0x10], "application/json"));
    if let Some(key) = key {
        fields.extend(literal(&[0x0f, 0x08], &format!("Bearer {key}")));
    }
    fields
}

#[derive(Debug, Clone, Copy)]
pub enum Method {
    Get,
    Post,
}

/// Sends `requests` at once, and one more for each that is answered, until the connection ends.
/// `request` makes the payload of its HEADERS; `answered` gets the fields of the answers, compressed.
pub async fn flood(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    requests: u32,
    mut request: impl FnMut() -> Vec<u8>,
    mut answered: impl FnMut(&[u8]),
) -> std::io::Result<()> {
    let mut next = 1;
    let mut send = |out: &mut Vec<u8>| {
        out.extend(frame(HEADERS, END_STREAM | END_HEADERS, next, &request()));
        next += 2;
    };
    let mut out = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    (0..requests).for_each(|_| send(&mut out));
    let mut taken = 0;
    loop {
        stream.write_all(&out).await?;
        out.clear();
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let (kind, flags) = (head[3], head[4]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).await?;
        match kind {
            SETTINGS | PING if flags & ACK == 0 => {
                let echo = if kind == PING { &payload[..] } else { &[] };
                out = frame(kind, ACK, 0, echo);
            }
            GOAWAY => return Ok(()),
            HEADERS => answered(&payload),
            DATA => taken += length,
            _ => {}
        }
        if taken >= WINDOW_BYTES {
            out.extend(frame(WINDOW_UPDATE, 0, 0, &taken.to_be_bytes()));
            taken = 0;
        }
        if [HEADERS, DATA].contains(&kind) && flags & END_STREAM != 0 {
            send(&mut out);
        }
    }
}
