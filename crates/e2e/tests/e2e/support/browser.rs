//! A real browser, controlled by WebDriver over a plain socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// The longest that a page may take to show something, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    /// None if there is no browser, after a message that the user sees. `cargo xtask test` installs one, and then it
    /// is required.
    pub(crate) fn find(test: &str) -> Option<Browser> {
        let driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        match driver {
            Ok(driver) => Some(Browser::start(driver)),
            Err(error) => {
                let is_due = std::env::var_os("OUTLAST_BROWSER").is_some();
                assert!(!is_due, "no chromedriver: {error}");
                let skipped =
                    format!("SKIPPED {test}: no browser (chromedriver: {error}; `cargo xtask test` sees to it)\n");
                io::stderr().write_all(skipped.as_bytes()).expect("stderr is open");
                None
            }
        }
    }

    fn start(mut driver: Child) -> Browser {
        let mut lines = BufReader::new(driver.stdout.take().expect("stdout is piped")).lines();
        // Its first line repeats the requested port, which is 0; a later line names the port that it uses.
        let port = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let port = line.split("on port ").nth(1)?.split(|letter: char| !letter.is_ascii_digit()).next()?;
            port.parse().ok().filter(|port| *port != 0)
        });
        let port = port.expect("the driver says where it listens");
        // Further output is read and dropped, so that it never blocks.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        let mut browser = Browser { driver, port, session: String::new() };
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
        ];
        let mut options = json!({"args": arguments});
        if std::path::Path::new("/usr/bin/chromium").exists() {
            options["binary"] = "/usr/bin/chromium".into();
        }
        let wishes = json!({"browserName": "chrome", "goog:chromeOptions": options,
                            "goog:loggingPrefs": {"browser": "ALL"}});
        let session = browser.ask("POST", "/session", &json!({"capabilities": {"alwaysMatch": wishes}}));
        browser.session = session["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let value = self.try_ask(method, path, body).unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert!(value["error"].is_null(), "{method} {path}: {value}");
        value
    }

    fn try_ask(&self, method: &str, path: &str, body: &Value) -> io::Result<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes())?;
        let mut reader = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().map_err(io::Error::other)?;
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut text = String::new();
        reader.take(length).read_to_string(&mut text)?;
        let mut answer: Value = serde_json::from_str(&text)?;
        Ok(answer["value"].take())
    }

    fn tell(&self, command: &str, body: &Value) -> Value {
        self.ask("POST", &format!("/session/{}/{command}", self.session), body)
    }

    pub(crate) fn open(&self, url: &str) {
        self.tell("url", &json!({"url": url}));
    }

    /// The result of a function body within the page.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.tell("execute/sync", &json!({"script": script, "args": []}))
    }

    /// Polls until the script returns something; returns that.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, script: &str) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.run(script);
            if !matches!(value, Value::Null | Value::Bool(false)) && value != "" {
                return value;
            }
            let shows = || self.run("return document.body.innerText");
            assert!(Instant::now() < deadline, "never saw {what}; the page shows {}", shows());
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// As for a person: a covered or disabled element is not clicked.
    #[track_caller]
    pub(crate) fn click(&self, selector: &str) {
        let found = self.tell("element", &json!({"using": "css selector", "value": selector}));
        let element = found.as_object().and_then(|keys| keys.values().next()).and_then(Value::as_str);
        let element = element.unwrap_or_else(|| panic!("no {selector}: {found}"));
        self.tell(&format!("element/{element}/click"), &json!({}));
    }

    #[track_caller]
    pub(crate) fn type_into(&self, selector: &str, text: &str) {
        let found = self.tell("element", &json!({"using": "css selector", "value": selector}));
        let element = found.as_object().and_then(|keys| keys.values().next()).and_then(Value::as_str);
        let element = element.unwrap_or_else(|| panic!("no {selector}: {found}"));
        self.tell(&format!("element/{element}/value"), &json!({"text": text}));
    }

    /// Sets the size of the window and the colour scheme.
    pub(crate) fn look(&self, width: u32, height: u32, scheme: &str) {
        let cdp = |command: &str, parameters: Value| {
            self.tell("goog/cdp/execute", &json!({"cmd": command, "params": parameters}));
        };
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        cdp("Emulation.setDeviceMetricsOverride", size);
        cdp("Emulation.setEmulatedMedia", json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}));
    }

    /// A PNG in base64.
    pub(crate) fn picture(&self) -> String {
        let command = json!({"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": true}});
        self.tell("goog/cdp/execute", &command)["data"].as_str().expect("a picture").to_owned()
    }

    /// Errors that the browser logged since the last call: broken scripts, violations of a policy.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.tell("se/log", &json!({"type": "browser"}));
        let entries = log.as_array().into_iter().flatten();
        entries.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

impl Drop for Browser {
    /// Ends the session, which ends the browser, and then the driver, also if the test has failed.
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let _ = self.try_ask("DELETE", &format!("/session/{}", self.session), &Value::Null);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
