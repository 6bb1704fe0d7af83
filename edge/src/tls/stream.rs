//! A TLS connection over a TCP connection, for tokio.

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use anyhow::Context as _;
use openssl::ssl::{self, ErrorCode, Ssl, SslStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// What OpenSSL decrypts at once: the largest TLS record.
const RECORD_BYTES_MAX: usize = 16 << 10;

/// A connection with or without TLS.
pub enum Stream {
    Plain(TcpStream),
    Tls(TlsStream),
}

/// OpenSSL's blocking interface, over a stream that says `WouldBlock` and remembers whom to wake.
pub struct TlsStream {
    ssl: SslStream<Blocking>,
    buffer: Box<[u8]>,
}

struct Blocking {
    tcp: TcpStream,
    waker: Waker,
}

impl Read for Blocking {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut buffer = ReadBuf::new(bytes);
        let polled = Pin::new(&mut self.tcp).poll_read(&mut Context::from_waker(&self.waker), &mut buffer);
        or_would_block(polled).map(|()| buffer.filled().len())
    }
}

impl Write for Blocking {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        or_would_block(Pin::new(&mut self.tcp).poll_write(&mut Context::from_waker(&self.waker), bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        or_would_block(Pin::new(&mut self.tcp).poll_flush(&mut Context::from_waker(&self.waker)))
    }
}

fn or_would_block<T>(polled: Poll<io::Result<T>>) -> io::Result<T> {
    match polled {
        Poll::Ready(result) => result,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl TlsStream {
    /// The server's side of the handshake.
    pub(crate) async fn accept(ssl: Ssl, tcp: TcpStream) -> anyhow::Result<Self> {
        let blocking = Blocking {
            tcp,
            waker: Waker::noop().clone(),
        };
        let ssl = SslStream::new(ssl, blocking).context("start TLS")?;
        let mut stream = Self {
            ssl,
            buffer: vec![0; RECORD_BYTES_MAX].into(),
        };
        std::future::poll_fn(|cx| stream.poll(cx, SslStream::accept)).await?;
        Ok(stream)
    }

    /// `Pending` if OpenSSL must wait for the network, in either direction.
    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut step: impl FnMut(&mut SslStream<Blocking>) -> Result<T, ssl::Error>,
    ) -> Poll<io::Result<T>> {
        let waker = &mut self.ssl.get_mut().waker;
        if !waker.will_wake(cx.waker()) {
            waker.clone_from(cx.waker());
        }
        loop {
            let error = match step(&mut self.ssl) {
                Ok(done) => return Poll::Ready(Ok(done)),
                Err(error) => error,
            };
            return match error.code() {
                // Without an I/O error it asks to be called again.
                ErrorCode::WANT_READ | ErrorCode::WANT_WRITE if error.io_error().is_none() => continue,
                ErrorCode::WANT_READ | ErrorCode::WANT_WRITE => Poll::Pending,
                _ => Poll::Ready(Err(error.into_io_error().unwrap_or_else(io::Error::other))),
            };
        }
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let length = buffer.len().min(into.remaining());
        let polled = self.poll(cx, |ssl| match ssl.ssl_read(&mut buffer[..length]) {
            // The client's end of the TLS session, or of the connection, is the end of the stream.
            // HTTP has its own way to tell whether a message is complete.
            Err(error) if error.code() == ErrorCode::ZERO_RETURN => Ok(0),
            Err(error) if error.code() == ErrorCode::SYSCALL && error.io_error().is_none() => Ok(0),
            read => read,
        });
        if let Poll::Ready(Ok(read)) = polled {
            into.put_slice(&buffer[..read]);
        }
        self.buffer = buffer;
        ready!(polled)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.poll(cx, |ssl| ssl.ssl_write(bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.ssl.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Tells the client that nothing was cut off. A client that is gone need not hear it.
        let told = self.poll(cx, |ssl| ssl.shutdown().map(drop));
        if told.is_pending() {
            return Poll::Pending;
        }
        Pin::new(&mut self.ssl.get_mut().tcp).poll_shutdown(cx)
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, into),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, bytes),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut *self {
            Self::Plain(tcp) => Pin::new(tcp).poll_write_vectored(cx, parts),
            Self::Tls(tls) => {
                let first = parts.iter().find(|part| !part.is_empty());
                Pin::new(tls).poll_write(cx, first.map_or(&[], |part| part))
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        matches!(self, Self::Plain(_))
    }
}
